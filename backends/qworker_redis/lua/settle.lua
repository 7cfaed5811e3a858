-- End leases, each if its claim still holds.
-- KEYS: meta msg sorted delayed leased claims keys errors fail done wake mark earlier
-- ARGV: sequence, sequence under `earlier` of a call whose answer was lost ('' none), 0 to keep done messages ('' not), number
--   of plain acks, then for each of these: id, claim; then for each other: how, id, claim, delay us, error, key
--   how: a(ck), t(emporary failure), p(ermanent failure), r(elease)
--   without any of both, the script only looks for the earlier answer
-- RETURNS: [1 if this is the answer of the earlier call, then the numbers of the refused, plain acks first]
local meta, msg, sorted, delayed, leased, claims, keys, errors, fail, done, wake, mark, earlier = unpack(KEYS)
local sequence = ARGV[1]
if ARGV[2] ~= '' then
  local refused = answered(earlier, ARGV[2])
  if refused then
    call('PEXPIRE', earlier, 3600000)
    refused[1] = 1
    return refused
  end
end
local now, keep, plain = clock(), ARGV[3], tonumber(ARGV[4])
local answer = {0}
if #ARGV == 4 then return answer end
-- A first write that needs no memory: before Redis 7 a full store lets a script go on that has begun to write.
call('ZREM', leased, '')

local function drop(ids)
  spread('HDEL', msg, ids)
  if call('EXISTS', errors) == 1 then spread('HDEL', errors, ids) end
end

local function ack_plain()
  local ids, held = {}, {}
  for i = 1, plain do ids[i] = ARGV[3 + 2 * i] end
  local found = call('HMGET', claims, unpack(ids))
  for i, id in ipairs(ids) do
    if found[i] == ARGV[4 + 2 * i] then held[#held + 1] = id else insert(answer, i) end
  end
  spread('ZREM', leased, held)
  spread('HDEL', claims, held)
  drop(held)
end

local function wait_or_run(id, value, delay)
  if delay > 0 then
    make_delayed(delayed, wake, id, now + delay)
  else
    make_ready(sorted, id, value)
    tell(wake)
  end
end

local function keep_error(id, why)
  if why ~= '' then call('HSET', errors, id, why) else call('HDEL', errors, id) end
end

local function ack(id, key)
  free_key(keys, key, id)
  if keep == '' then
    drop({id})
  else
    call('ZADD', done, text(now), id)
  end
end

local function finish(how, id, delay, why, key)
  if how == 'a' then return ack(id, key) end
  local value = call('HGET', msg, id)
  if not value then return end
  if how == 'p' then
    call('ZADD', fail, text(now), id)
    keep_error(id, why)
    free_key(keys, key, id)
  elseif how == 't' then
    value = one_more_try(value)
    call('HSET', msg, id, value)
    keep_error(id, why)
    wait_or_run(id, value, delay)
  else
    wait_or_run(id, value, delay)
  end
end

if plain > 0 then ack_plain() end
local number = plain
for i = 5 + 2 * plain, #ARGV, 6 do
  number = number + 1
  local id, claim = ARGV[i + 1], ARGV[i + 2]
  if call('HGET', claims, id) == claim then
    call('ZREM', leased, id)
    call('HDEL', claims, id)
    finish(ARGV[i], id, tonumber(ARGV[i + 3]), ARGV[i + 4], ARGV[i + 5])
  else
    insert(answer, number)
  end
end
return remember(mark, sequence, answer)
