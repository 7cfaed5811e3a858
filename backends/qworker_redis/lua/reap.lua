-- Make expired messages (tries + 1, deaths + 1) and due messages ready, and remove finished ones whose retention has ended.
-- KEYS: meta msg ready sorted delayed leased claims errors fail done wake
-- ARGV: most messages of each kind, us to keep failed messages ('' forever), us to keep done ones ('' forever), the
--   time that this client's last call answered ('' none), us that have passed since on a clock that is never set, most
--   failed messages to keep ('' any number), most done ones ('' any number)
-- RETURNS: [messages made ready, 1 if there is more to do, now us]
local meta, msg, ready, sorted, delayed, leased, claims, errors, fail, done, wake = unpack(KEYS)
local state = call('HMGET', meta, 'version', 'down', 'seen')
if not state[1] then return {0, 0, 0} end
if state[1] ~= '1' then return too_new(state[1]) end
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
-- There are more members than the anchor.
if call('ZCARD', leased) > 1 then keep_leases(meta, leased, state[3], now) end
local expired = expire()
local due = take_due(msg, sorted, delayed, now, limit)
local failed = forget(fail, ARGV[2], ARGV[6])
local finished = forget(done, ARGV[3], ARGV[7])
-- This also replaces a wake-up that was lost with the client that took it.
if not state[2] and count_ready(meta, ready, sorted) > 0 then wake_one(wake) end
local more = math.max(expired, due, failed, finished) == limit
return {expired + due, more and 1 or 0, now}
