-- End leases, each if its claim still holds. An ack is rfq's commit: LREM nextlog 1, LREM backlog 1, DEL message.
-- KEYS: backlog nextlog message leased claims delayed tries errors enqueued origins failed mark earlier
-- ARGV: sequence, sequence under `earlier` of a call whose answer was lost ('' none), '', number of plain acks, then
--   for each of these: id, claim; then for each other: how, id, claim, delay us, error, key
--   how: a(ck), t(emporary failure), p(ermanent failure), r(elease)
--   without both kinds, the script only reads the earlier answer
-- RETURNS: [1 if this is the answer of the earlier call, then the numbers of the refused, plain acks first]
local backlog, nextlog, message, leased, claims, delayed, tries, errors, enqueued, origins = unpack(KEYS)
local failed, mark, earlier = unpack(KEYS, 11)
local early = early_answer(earlier)
if early then return early end
local now = clock()

-- A harvest that copies before it removes may have an id in both lists for a moment, with the copy near the head of
-- `backlog`. Searching all of that list for every commit would make the cost of each commit proportional to the depth
-- of the backlog.
local young = {}
for _, id in ipairs(call('LRANGE', backlog, 0, 99)) do young[id] = true end

local function take_out(id)
  local worked = call('LREM', nextlog, 1, id) == 1
  if not worked or young[id] then call('LREM', backlog, 1, id) end
  return worked
end

local done, places = {}, {}

local function ack_plain(ids)
  for _, id in ipairs(ids) do take_out(id) end
  forget(message, tries, errors, enqueued, origins, ids)
end

local function wait_or_run(id, delay, token)
  if delay > 0 then call('ZCARD', delayed) end
  -- The program that harvested it, or consumed it after that, now decides about it.
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

local function finish(how, id, claim, delay, reason)
  if how == 'a' then
    take_out(id)
    insert(done, id)
  elseif how == 'p' then
    if call('EXISTS', message .. ':' .. id) == 1 then
      keep_error(errors, id, reason)
      call('ZADD', failed, text(now), id)
    else
      insert(done, id)
    end
    take_out(id)
  elseif how == 't' then
    keep_error(errors, id, reason)
    wait_or_run(id, delay)
    call('HINCRBY', tries, id, 1)
  else
    wait_or_run(id, delay, token_of(claim))
  end
end

local answer = end_leases(leased, claims, ack_plain, finish)
forget(message, tries, errors, enqueued, origins, done)
put_back(backlog, places)
return remember(mark, ARGV[1], answer)
