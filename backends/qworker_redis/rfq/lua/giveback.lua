-- Release the messages that a call for a lease has claimed, because its answer is not read. That call claims nothing
-- from now on.
-- KEYS: backlog nextlog message leased claims void
-- ARGV: claimant, ms for which the call might still arrive
-- RETURNS: messages released
local backlog, nextlog, message, leased, claims, void = unpack(KEYS)
check_types({}, {}, {backlog, nextlog})
local places, ids, found = {}, end_call(leased, claims, void)
for i, id in ipairs(ids) do
  if call('LREM', nextlog, 1, id) == 1 and call('EXISTS', message .. ':' .. id) == 1 then
    insert(places, {token_of(found[i]), id})
  end
end
put_back(backlog, places)
return #ids
