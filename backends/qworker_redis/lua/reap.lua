-- Make expired messages (tries + 1, deaths + 1) and due messages ready, and remove what has ended: finished messages
-- whose retention has, holds, and cells.
-- KEYS: meta msg ready sorted delayed leased claims errors fail done wake gone holds cells celldue cellnames
-- ARGV: most messages of each kind, us to keep failed messages ('' forever), us to keep done ones ('' forever), the
--   time that this client's last call answered ('' none), us that have passed since on a clock that is never set, most
--   failed messages to keep ('' any number), most done ones ('' any number), the client's host and its time; then id and
--   claim of leases that the client holds
-- RETURNS: [messages made ready, 1 if there is more to do, now us, 1 if there is a queue, then of each lease that is gone
--   its number, and 1 if its message was cancelled]
local meta, msg, ready, sorted, delayed, leased, claims, errors, fail, done, wake, gone, holds = unpack(KEYS)
local cells, celldue, cellnames = unpack(KEYS, 14)
local state = call('HMGET', meta, 'version', 'down', 'seen', 'gone')
if not state[1] and call('EXISTS', msg) == 0 then
  local answer = {0, 0, clock(), 0}
  for _, number in ipairs(lost_leases(claims, 9)) do
    insert(answer, number)
    insert(answer, 0)
  end
  return answer
end
if state[1] and state[1] ~= '1' then return too_new(state[1]) end
local zsets = {sorted, delayed, leased, fail, done, holds, celldue, cellnames}
check_types(zsets, {msg, claims, errors, gone, cells}, {ready, wake})
local now, limit = clock(), tonumber(ARGV[1])

local function expire()
  local expired = call('ZRANGEBYSCORE', leased, '-inf', text(now), 'LIMIT', 0, limit)
  if #expired == 0 then return 0 end
  spread('ZREM', leased, expired)
  spread('HDEL', claims, expired)
  local values = read(msg, expired)
  for i, id in ipairs(expired) do
    if values[i] then
      local value = one_more_try(values[i], true)
      call('HSET', msg, id, value)
      call('HSET', errors, id, 'the lease expired')
      make_ready(sorted, id, value)
    end
  end
  return #expired
end

local function forget(set, age, most)
  local old = take_old(set, age, most, now, limit)
  spread('HDEL', msg, old)
  spread('HDEL', errors, old)
  return #old
end

call('ZREM', leased, '')
-- A key that had another type, or was lost, is gone.
if not state[1] or not call('ZSCORE', leased, ANCHOR) then make_queue(meta, leased, claims) end
-- There are more members than the anchor.
if call('ZCARD', leased) > 1 then keep_leases(meta, leased, state[3], now, ARGV[8], ARGV[4], ARGV[5]) end
local expired = expire()
local due = take_due(msg, sorted, delayed, now, limit)
local over = call('ZRANGEBYSCORE', holds, '-inf', text(now), 'LIMIT', 0, limit)
spread('ZREM', holds, over)
local dead = call('ZRANGEBYSCORE', celldue, '-inf', text(now), 'LIMIT', 0, limit)
if #dead > 0 then
  -- Last the set that shows them: if another key has another type, they are removed later.
  spread('HDEL', cells, dead)
  spread('ZREM', cellnames, dead)
  spread('ZREM', celldue, dead)
end
local failed = forget(fail, ARGV[2], ARGV[6])
local finished = forget(done, ARGV[3], ARGV[7])
-- This also replaces a wake-up that was lost with the client that took it.
if not state[2] and count_ready(meta, ready, sorted) > 0 then wake_one(wake) end
local more = math.max(expired, due, failed, finished, #over, #dead) == limit
more = tidy_ready(meta, msg, ready, sorted, gone, tonumber(state[4] or 0)) or more
local answer = {expired + due, more and 1 or 0, now, 1}
for _, number in ipairs(lost_leases(claims, 9)) do
  local id = ARGV[7 + 2 * number]
  insert(answer, number)
  insert(answer, call('ZSCORE', fail, id) and is_cancelled(errors, id) and 1 or 0)
end
return answer
