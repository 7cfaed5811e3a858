-- End leases, each if its claim still holds.
-- KEYS: meta msg sorted delayed leased claims keys errors fail done wake mark earlier
-- ARGV: sequence, sequence under `earlier` of a call whose answer was lost ('' none), 0 to keep done messages ('' not),
--   number of plain acks, then for each of these: id, claim; then for each other: how, id, claim, delay us, error, key
--   how: a(ck), t(emporary failure), d(eath of the handler's process: a temporary failure), p(ermanent failure),
--   r(elease), s(urvived: a release after which there is no death)
--   without both kinds, the script only reads the earlier answer
-- RETURNS: [1 if this is the answer of the earlier call, then the numbers of the refused, plain acks first]
local meta, msg, sorted, delayed, leased, claims, keys, errors, fail, done, wake, mark, earlier = unpack(KEYS)
local early = early_answer(earlier)
if early then return early end
local now, keep, awake = clock(), ARGV[3], false

local function drop(ids)
  spread('HDEL', msg, ids)
  if call('EXISTS', errors) == 1 then spread('HDEL', errors, ids) end
end

local function wait_or_run(id, value, delay)
  if delay > 0 then
    awake = make_delayed(delayed, id, now + delay) or awake
  else
    make_ready(sorted, id, value)
    awake = true
  end
end

local function ack(id, key)
  if key and key ~= '' then free_key(keys, id, call('HGET', msg, id)) end
  if keep == '' then
    drop({id})
  else
    call('ZADD', done, text(now), id)
  end
end

local function finish(how, id, _, delay, reason, key)
  if how == 'a' then return ack(id, key) end
  local value = call('HGET', msg, id)
  if not value then return end
  if how == 'p' then
    keep_error(errors, id, reason)
    call('ZADD', fail, text(now), id)
    free_key(keys, id, value)
  elseif how == 't' or how == 'd' then
    keep_error(errors, id, reason)
    wait_or_run(id, value, delay)
    call('HSET', msg, id, one_more_try(value, how == 'd'))
  else
    wait_or_run(id, value, delay)
    if how == 's' then call('HSET', msg, id, with_deaths(value, 0)) end
  end
end

local answer = remember(mark, ARGV[1], end_leases(leased, claims, drop, finish))
if awake then wake_one(wake) end
return answer
