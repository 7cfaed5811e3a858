-- Extend leases.
-- KEYS: leased claims
-- ARGV: visibility us, then for each lease: id, claim
-- RETURNS: [expiry us, then the numbers of the leases that are lost]
local leased, claims = KEYS[1], KEYS[2]
local expiry = clock() + tonumber(ARGV[1])
local ids, scores = {}, {}
for i = 2, #ARGV, 2 do insert(ids, ARGV[i]) end
local held = call('HMGET', claims, unpack(ids))
local answer, expires = {expiry}, text(expiry)
for i, id in ipairs(ids) do
  if held[i] == ARGV[2 * i + 1] then
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
