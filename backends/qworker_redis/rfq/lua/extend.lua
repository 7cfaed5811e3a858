-- Extend leases. A lease whose message was harvested is lost.
-- KEYS: leased claims nextlog
-- ARGV: visibility us, then for each lease: id, claim
-- RETURNS: [expiry us, then the numbers of the leases that are lost]
local leased, claims, nextlog = unpack(KEYS)
local worked = {}
for _, id in ipairs(call('LRANGE', nextlog, 0, 3 * (#ARGV - 1) / 2)) do worked[id] = true end
return extend_leases(leased, claims, function(id) return worked[id] or call('LPOS', nextlog, id) end)
