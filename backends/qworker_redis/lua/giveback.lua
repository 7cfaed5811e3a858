-- Put back, untouched, what a call for a lease claimed whose answer nobody reads; that call claims nothing from now on.
-- KEYS: meta msg sorted leased claims wake void
-- ARGV: claimant, ms for which the call might still arrive
-- RETURNS: messages put back
local meta, msg, sorted, leased, claims, wake, void = unpack(KEYS)
local ids = end_call(leased, claims, void)
for _, id in ipairs(ids) do
  local value = call('HGET', msg, id)
  if value then make_ready(sorted, id, value) end
end
if #ids > 0 then tell(wake) end
return #ids
