-- Claim ready messages, the first in order.
-- KEYS: meta msg ready sorted delayed leased claims keys gone errors wake void
-- ARGV: limit, visibility us, claimant, most bytes of a body ('' any number), the client's host and
--   its time ('' not known)
-- RETURNS: [token, expiry us, us until the next message is due (-1: none is known; 0: lease again now), ids, values,
--   claimant, ids of the messages whose bodies are too large: they are delayed now]
local meta, msg, ready, sorted, delayed, leased, claims, keys, gone, errors, wake, void = unpack(KEYS)
local none = {0, 0, -1, {}, {}}
-- The client has abandoned this call, and relies on it that the call claims nothing.
if call('EXISTS', void) == 1 then return none end
local state = call('HMGET', meta, 'version', 'down', 'fence', 'gone', 'seen', 'started')
if not state[1] or state[2] then return none end
if state[1] ~= '1' then return too_new(state[1]) end

local limit, removed, now = tonumber(ARGV[1]), tonumber(state[4] or 0), clock()
check_clock(meta, leased, state[5], now, ARGV[5])
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
    take_rows(meta, ready, gone, first.heads, first.stale, first.rows)
  end
  found = #ids
  for i = 1, most and found or 0 do
    -- A value is longer than its body: only one that exceeds the limit is examined.
    if values[i] and #values[i] > most then
      ids, values = delay_large(errors, delayed, ids, values, most, now, large)
      removed = tonumber(call('HGET', meta, 'gone') or 0)
      break
    end
  end
until #ids > 0 or found == 0 or #large >= 1000
if #ids == 0 then
  -- Only rows of removed messages, or messages that are too large, were found so far: the next call finds more.
  local again = found > 0 or (removed > 0 and call('LLEN', ready) > 0)
  return {0, 0, again and 0 or until_due(delayed, now), {}, {}, ARGV[3], large}
end

-- The token rises even if a failover has lost the last increments.
local token = math.max(tonumber(state[3] or 0) + 1, now)
local expiry = now + tonumber(ARGV[2])
local claim, expires = text(token) .. ' ' .. ARGV[3], text(expiry)
local scores, holders = {}, {}
for i = 1, #ids do
  scores[2 * i - 1], scores[2 * i] = expires, ids[i]
  holders[2 * i - 1], holders[2 * i] = ids[i], claim
end
local function claim_all()
  -- Some messages of this queue have keys that are free from the first lease on.
  for i = 1, state[6] and #ids or 0 do
    if values[i] and is_free_when_started(values[i]) then free_key(keys, ids[i], values[i]) end
  end
  -- Rows may be left for another worker.
  if #ids == limit and count_ready(meta, ready, sorted) > 0 then wake_one(wake) end
  call('HSET', meta, 'fence', text(token))
  spread('ZADD', leased, scores)
  spread('HSET', claims, holders)
end

-- Make all ready again, in the one order that `ready` and `sorted` share.
local function make_all_ready()
  for i, id in ipairs(ids) do
    if values[i] then make_ready(sorted, id, values[i]) end
  end
  redis.pcall('ZREM', leased, unpack(ids))
end

local failed = write_or_undo(claim_all, make_all_ready)
if failed then return failed end
return {token, expiry, 0, ids, values, ARGV[3], large}
