-- Claim ready messages, the first in order.
-- KEYS: meta msg ready sorted delayed leased claims gone errors wake void
-- ARGV: limit, visibility us, claimant, most bytes of a body ('' any number)
-- RETURNS: [token, expiry us, us until the next message is due (-1: none is known), ids, values, claimant, ids of the
--   messages whose bodies are too large: they are delayed now]
local meta, msg, ready, sorted, delayed, leased, claims, gone, errors, wake, void = unpack(KEYS)
local none = {0, 0, -1, {}, {}}
-- The client has abandoned this call, and relies on it that the call claims nothing.
if call('EXISTS', void) == 1 then return none end
local state = call('HMGET', meta, 'version', 'down', 'fence', 'gone')
if not state[1] or state[2] then return none end
if state[1] ~= '1' then return too_new(state[1]) end

local limit, removed, now = tonumber(ARGV[1]), tonumber(state[4] or 0), clock()
take_due(msg, sorted, delayed, now, 500)
local most, large = tonumber(ARGV[4]), {}
local ids, values, found
repeat
  if removed == 0 and call('ZCARD', sorted) == 0 then
    ids = call('LPOP', ready, limit) or {}
    values = read(msg, ids)
  else
    local first = first_ready(msg, ready, sorted, gone, removed, limit)
    ids, values = first.ids, first.values
    spread('ZREM', sorted, first.members)
    if first.rows > 0 then
      call('LTRIM', ready, first.rows, -1)
      local passed = {}
      for _, number in ipairs(first.stale) do
        if number <= first.rows then insert(passed, first.heads[number]) end
      end
      forget_gone(meta, gone, passed)
      removed = removed - #passed
    end
  end
  found = #ids
  for i = 1, most and found or 0 do
    -- A value is longer than its body: only one that exceeds the limit is examined.
    if values[i] and #values[i] > most then
      ids, values = delay_large(errors, delayed, ids, values, most, now, large)
      break
    end
  end
until #ids > 0 or found == 0 or #large >= 1000
if #ids == 0 then return {0, 0, found == 0 and until_due(delayed, now) or 0, {}, {}, ARGV[3], large} end

-- The token rises even if a failover has lost the last increments.
local token = math.max(tonumber(state[3] or 0) + 1, now)
local expiry = now + tonumber(ARGV[2])
local claim, expires = text(token) .. ' ' .. ARGV[3], text(expiry)
local scores, holders = {}, {}
for i = 1, #ids do
  scores[2 * i - 1], scores[2 * i] = expires, ids[i]
  holders[2 * i - 1], holders[2 * i] = ids[i], claim
end
call('HSET', meta, 'fence', text(token))
spread('ZADD', leased, scores)
spread('HSET', claims, holders)
-- Rows may be left for another worker.
if #ids == limit and count_ready(meta, ready, sorted) > 0 then wake_one(wake) end
return {token, expiry, 0, ids, values, ARGV[3], large}
