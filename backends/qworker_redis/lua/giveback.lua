-- Release the messages that a call for a lease has claimed, because its answer is not read. That call claims nothing
-- from now on.
-- KEYS: meta msg sorted leased claims wake void
-- ARGV: claimant, ms for which the call might still arrive
-- RETURNS: messages released
local meta, msg, sorted, leased, claims, wake, void = unpack(KEYS)
check_types({sorted}, {msg}, {wake})
local ids = end_call(leased, claims, void)
for _, id in ipairs(ids) do
  local value = call('HGET', msg, id)
  if value then make_ready(sorted, id, value) end
end
if #ids > 0 then wake_one(wake) end
return #ids
