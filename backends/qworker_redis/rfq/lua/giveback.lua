-- Put back, untouched, what a call for a lease claimed whose answer nobody will read; that call claims nothing from now on.
-- KEYS: backlog nextlog message leased claims void
-- ARGV: claimant, ms for which the call might still arrive
-- RETURNS: messages put back
local backlog, nextlog, message, leased, claims, void = unpack(KEYS)
call('ZREM', leased, '')
call('SET', void, '1', 'PX', ARGV[2])
local held, places, ids = call('HGETALL', claims), {}, {}
for i = 1, #held, 2 do
  local space = string.find(held[i + 1], ' ', 1, true)
  if space and string.sub(held[i + 1], space + 1) == ARGV[1] then
    insert(ids, held[i])
    if call('LREM', nextlog, 1, held[i]) == 1 and call('EXISTS', message .. ':' .. held[i]) == 1 then
      insert(places, {token_of(held[i + 1]), held[i]})
    end
  end
end
spread('ZREM', leased, ids)
spread('HDEL', claims, ids)
put_back(backlog, places)
return #ids
