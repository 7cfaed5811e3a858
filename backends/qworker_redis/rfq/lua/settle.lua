-- End leases, each if its claim still holds. An ack is rfq's commit: LREM nextlog 1, LREM backlog 1, DEL message.
-- KEYS: backlog nextlog message leased claims delayed tries errors enqueued origins failed mark earlier
-- ARGV: sequence, sequence under `earlier` of a call whose answer was lost ('' none), '', number of plain acks, then for each of
--   these: id, claim; then for each other: how, id, claim, delay us, error, key
--   how: a(ck), t(emporary failure), p(ermanent failure), r(elease)
--   without any of both, the script only looks for the earlier answer
-- RETURNS: [1 if this is the answer of the earlier call, then the numbers of the refused, plain acks first]
local backlog, nextlog, message, leased, claims, delayed, tries, errors, enqueued, origins, failed, mark, earlier = unpack(KEYS)
local sequence = ARGV[1]
if ARGV[2] ~= '' then
  local refused = answered(earlier, ARGV[2])
  if refused then
    call('PEXPIRE', earlier, 3600000)
    refused[1] = 1
    return refused
  end
end
local now, plain = clock(), tonumber(ARGV[4])
local answer = {0}
if #ARGV == 4 then return answer end
-- A first write that needs no memory: before Redis 7 a full store lets a script go on that has begun to write.
call('ZREM', leased, '')

-- A harvest that copies before it removes may have an id in both lists for a moment, the copy near the head of `backlog`: searching
-- all of that for every commit would make each one cost as much as the backlog is deep.
local young = {}
for _, id in ipairs(call('LRANGE', backlog, 0, 99)) do young[id] = true end

local function take_out(id)
  local worked = call('LREM', nextlog, 1, id) == 1
  if not worked or young[id] then call('LREM', backlog, 1, id) end
  return worked
end

local done, places = {}, {}

local function ack_plain()
  local ids, held = {}, {}
  for i = 1, plain do ids[i] = ARGV[3 + 2 * i] end
  local found = call('HMGET', claims, unpack(ids))
  for i, id in ipairs(ids) do
    if found[i] == ARGV[4 + 2 * i] then held[#held + 1] = id else insert(answer, i) end
  end
  spread('ZREM', leased, held)
  spread('HDEL', claims, held)
  for _, id in ipairs(held) do take_out(id) end
  forget(message, tries, errors, enqueued, origins, held)
end

local function wait_or_run(id, delay, token)
  -- Who harvested it, or consumed it after that, decides about it now.
  if call('LREM', nextlog, 1, id) == 0 then return end
  if call('EXISTS', message .. ':' .. id) == 0 then
    insert(done, id)
  elseif delay > 0 then
    call('ZADD', delayed, text(now + delay), id)
  elseif token then
    insert(places, {token, id})
  else
    call('LPUSH', backlog, id)
  end
end

local function keep_error(id, why)
  if why ~= '' then call('HSET', errors, id, why) else call('HDEL', errors, id) end
end

local function finish(how, id, claim, delay, why)
  if how == 'a' then
    take_out(id)
    insert(done, id)
  elseif how == 'p' then
    take_out(id)
    if call('EXISTS', message .. ':' .. id) == 0 then return insert(done, id) end
    call('ZADD', failed, text(now), id)
    keep_error(id, why)
  elseif how == 't' then
    call('HINCRBY', tries, id, 1)
    keep_error(id, why)
    wait_or_run(id, delay)
  else
    wait_or_run(id, delay, token_of(claim))
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
    finish(ARGV[i], id, claim, tonumber(ARGV[i + 3]), ARGV[i + 4])
  else
    insert(answer, number)
  end
end
forget(message, tries, errors, enqueued, origins, done)
put_back(backlog, places)
return remember(mark, sequence, answer)
