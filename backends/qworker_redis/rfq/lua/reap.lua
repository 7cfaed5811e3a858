-- Harvest the expired messages of qworker's own consumers (tries + 1), make due messages ready, and remove failed ones
-- whose retention has ended.
-- KEYS: meta backlog nextlog message leased claims delayed tries errors enqueued origins failed
-- ARGV: most messages of each kind, us to keep failed messages ('' forever), '', the time that this client's last call
--   answered ('' none), us that have passed since on a clock that is never set, most failed messages to keep ('' any
--   number), '', the client's host and its time; then id and claim of leases that the client holds
-- RETURNS: [messages made ready, 1 if there is more to do, now us, 1 if there is a topic, then of each lease that is gone
--   its number, and 0]
local meta, backlog, nextlog, message, leased, claims, delayed, tries, errors, enqueued, origins, failed = unpack(KEYS)
local state = call('HMGET', meta, 'version', 'seen')
local function answer(count, more, now, is_there)
  local result = {count, more, now, is_there}
  for _, number in ipairs(lost_leases(claims, 9)) do
    insert(result, number)
    insert(result, 0)
  end
  return result
end

if not state[1] then return answer(0, 0, clock(), 0) end
if state[1] ~= '1' then return too_new(state[1]) end
check_types({leased, delayed, failed}, {claims, tries, errors, enqueued, origins}, {backlog, nextlog})
local now, limit = clock(), tonumber(ARGV[1])

-- End our lease of a message that is not ours any more, or was not extended. Return whether that makes it ready.
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

-- After a harvest or a purge by another program, the messages that were ours are not in `nextlog` any more. This must
-- be noticed soon, because another consumer may take them next, and then the list does not show which consumer has
-- them.
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
  local old = take_old(failed, age, most, now, limit)
  forget(message, tries, errors, enqueued, origins, old)
  return #old
end

-- Other consumers commit messages about which we keep data: check some at a time.
local function sweep(notes)
  for _, id in ipairs(call('HRANDFIELD', notes, 5) or {}) do
    if call('EXISTS', message .. ':' .. id) == 0 then forget(message, tries, errors, enqueued, origins, {id}) end
  end
end

call('ZREM', leased, '')
if call('EXISTS', leased) == 1 then keep_leases(meta, leased, state[2], now, ARGV[8], ARGV[4], ARGV[5]) end
local count, expired = expire()
notice_harvest()
local due = take_due(backlog, message, delayed, now, limit)
local removed = forget_failed(ARGV[2], ARGV[6])
sweep(tries)
sweep(enqueued)
return answer(count + due, math.max(expired, due, removed) == limit and 1 or 0, now, 1)
