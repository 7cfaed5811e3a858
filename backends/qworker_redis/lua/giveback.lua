-- Put back, untouched, what a call for a lease claimed whose answer nobody will read; that call claims nothing from now on.
-- KEYS: meta msg sorted leased claims wake void
-- ARGV: claimant, ms for which the call might still arrive
-- RETURNS: messages put back
local meta, msg, sorted, leased, claims, wake, void = unpack(KEYS)
call('ZREM', leased, '')
call('SET', void, '1', 'PX', ARGV[2])
local held, ids = call('HGETALL', claims), {}
for i = 1, #held, 2 do
  local space = string.find(held[i + 1], ' ', 1, true)
  if space and string.sub(held[i + 1], space + 1) == ARGV[1] then insert(ids, held[i]) end
end
if #ids == 0 then return 0 end
spread('ZREM', leased, ids)
spread('HDEL', claims, ids)
for _, id in ipairs(ids) do
  local value = call('HGET', msg, id)
  if value then make_ready(sorted, id, value) end
end
tell(wake)
return #ids
