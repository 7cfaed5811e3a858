-- Extend leases. A lease whose message was harvested is lost.
-- KEYS: meta leased claims nextlog
-- ARGV: visibility us, the client's host and its time, then for each lease: id, claim
-- RETURNS: [expiry us, then the numbers of the leases that are lost]
local meta, leased, claims, nextlog = unpack(KEYS)
local worked = {}
for _, id in ipairs(call('LRANGE', nextlog, 0, 3 * (#ARGV - 2) / 2)) do worked[id] = true end
return extend_leases(meta, leased, claims, function(id) return worked[id] or call('LPOS', nextlog, id) end)
