-- Harvest what qworker's own consumers left behind (tries + 1), make ready what is due, and remove what failed long enough ago.
-- KEYS: meta backlog nextlog message leased claims delayed tries errors enqueued origins failed
-- ARGV: most messages of each kind, us to keep failed messages ('' for ever), '', the time that this client's last call answered
--   ('' none), us that have passed since on a clock that nobody sets, most failed messages to keep ('' any number)
-- RETURNS: [messages made ready, 1 if there is more to do, now us]
local meta, backlog, nextlog, message, leased, claims, delayed, tries, errors, enqueued, origins, failed = unpack(KEYS)
local state = call('HMGET', meta, 'version', 'seen')
if not state[1] then return {0, 0, 0} end
if state[1] ~= '1' then return too_new(state[1]) end
local now, limit = clock(), tonumber(ARGV[1])

-- This server's clock was set: it has gone further than time has, in the eyes of this client, and since the last time that any client
-- looked. Leases keep what was left of them.
local TOLERANCE = 10000000

local function keep_leases()
  if call('EXISTS', leased) == 0 then return end
  call('HSET', meta, 'seen', text(now))
  if ARGV[4] == '' or not state[2] then return end
  local step = now - tonumber(ARGV[4]) - tonumber(ARGV[5])
  if math.abs(step) <= TOLERANCE or math.abs(now - tonumber(state[2])) <= TOLERANCE then return end
  local rows, moved = call('ZRANGE', leased, 0, -1, 'WITHSCORES'), {}
  for i = 1, #rows, 2 do
    insert(moved, text(tonumber(rows[i + 1]) + step))
    insert(moved, rows[i])
  end
  spread('ZADD', leased, moved)
end

-- End our lease of a message that is not ours any more, or was not extended; whether it is ready by that.
local function end_lease(id, why)
  call('ZREM', leased, id)
  call('HDEL', claims, id)
  local worked = call('LREM', nextlog, 1, id) == 1
  if call('EXISTS', message .. ':' .. id) == 0 then
    forget(message, tries, errors, enqueued, origins, {id})
    return false
  end
  call('HINCRBY', tries, id, 1)
  call('HSET', errors, id, why)
  if worked then call('LPUSH', backlog, id) end
  return worked
end

local function expire()
  local expired, count = call('ZRANGEBYSCORE', leased, '-inf', text(now), 'LIMIT', 0, limit), 0
  for _, id in ipairs(expired) do
    if end_lease(id, 'the lease expired') then count = count + 1 end
  end
  return count, #expired
end

-- Somebody ran harvest or purge: what was ours is not in `nextlog` any more. Noticed soon, for a foreign consumer may take it next, and
-- then the list does not tell whose it is.
local function notice_harvest()
  local ours = call('ZCARD', leased)
  if ours == 0 or ours > 2000 then return end
  local worked = {}
  for _, id in ipairs(call('LRANGE', nextlog, 0, 9999)) do worked[id] = true end
  for _, id in ipairs(call('ZRANGE', leased, 0, -1)) do
    if not worked[id] and not call('LPOS', nextlog, id) then end_lease(id, 'it was harvested while a worker had it') end
  end
end

local function forget_failed(age, most)
  local old = {}
  if age ~= '' then
    old = call('ZRANGEBYSCORE', failed, '-inf', text(now - tonumber(age)), 'LIMIT', 0, limit)
  elseif most ~= '' then
    local excess = call('ZCARD', failed) - tonumber(most)
    if excess > 0 then old = call('ZRANGE', failed, 0, math.min(excess, limit) - 1) end
  end
  if #old == 0 then return 0 end
  spread('ZREM', failed, old)
  forget(message, tries, errors, enqueued, origins, old)
  return #old
end

-- Foreign consumers commit messages of which we have notes: look at some at a time.
local function sweep(notes)
  for _, id in ipairs(call('HRANDFIELD', notes, 5) or {}) do
    if call('EXISTS', message .. ':' .. id) == 0 then forget(message, tries, errors, enqueued, origins, {id}) end
  end
end

call('ZREM', leased, '')
keep_leases()
local count, expired = expire()
notice_harvest()
local due = take_due(backlog, message, delayed, now, limit)
local removed = forget_failed(ARGV[2], ARGV[6])
sweep(tries)
sweep(enqueued)
return {count + due, math.max(expired, due, removed) == limit and 1 or 0, now}
