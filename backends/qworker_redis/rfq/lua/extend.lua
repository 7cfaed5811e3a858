-- Extend leases; one that somebody has harvested is lost.
-- KEYS: leased claims nextlog
-- ARGV: visibility us, then for each lease: id, claim
-- RETURNS: [expiry us, then the numbers of the leases that are lost]
local leased, claims, nextlog = unpack(KEYS)
local expiry = clock() + tonumber(ARGV[1])
local ids, scores = {}, {}
for i = 2, #ARGV, 2 do insert(ids, ARGV[i]) end
local held, worked = call('HMGET', claims, unpack(ids)), {}
for _, id in ipairs(call('LRANGE', nextlog, 0, 3 * #ids)) do worked[id] = true end
local answer, expires = {expiry}, text(expiry)
for i, id in ipairs(ids) do
  if held[i] == ARGV[2 * i + 1] and (worked[id] or call('LPOS', nextlog, id)) then
    insert(scores, expires)
    insert(scores, id)
  else
    insert(answer, i)
  end
end
-- A first write that needs no memory: before Redis 7 a full store lets a script go on that has begun to write.
call('ZREM', leased, '')
spread('ZADD', leased, scores)
return answer
