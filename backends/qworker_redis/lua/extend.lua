-- Extend leases.
-- KEYS: meta leased claims
-- ARGV: visibility us, the client's host and its time, then for each lease: id, claim
-- RETURNS: [expiry us, then the numbers of the leases that are lost]
return extend_leases(KEYS[1], KEYS[2], KEYS[3], function() return true end)
