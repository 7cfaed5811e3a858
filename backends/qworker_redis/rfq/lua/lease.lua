-- Claim messages, the next in line first: RPOPLPUSH and HGETALL for each, as rfq does, and a claim.
-- KEYS: meta backlog nextlog message leased claims delayed tries errors enqueued origins void
-- ARGV: limit, visibility us, claimant, most bytes of a body ('' any number), the client's host and
--   its time ('' not known)
-- RETURNS: [first token, expiry us, us until the next message is due (-1: none is known, -2: the topic is paused), ids,
--   values, claimant, ids of the messages that are too large: they are delayed now]; the token of each id is one more
--   than that of the one before
local meta, backlog, nextlog, message, leased, claims, delayed, tries, errors, enqueued, origins, void = unpack(KEYS)
-- The client has abandoned this call, and relies on it that the call claims nothing.
if call('EXISTS', void) == 1 then return {0, 0, -1, {}, {}} end
local state = call('HMGET', meta, 'version', 'down', 'fence', 'seen')
if state[1] and state[1] ~= '1' then return too_new(state[1]) end
if state[2] then return {0, 0, -2, {}, {}} end

local limit, now = tonumber(ARGV[1]), clock()
-- A topic of another program does not get a key from a call that leases nothing.
if state[1] then check_clock(meta, leased, state[4], now, ARGV[5]) end
take_due(backlog, message, delayed, now, 500)
local most, large = tonumber(ARGV[4]), {}
local ids, fields, seen = {}, {}, {}
while #ids < limit and #large < 1000 do
  local popped = call('RPOP', backlog, limit - #ids) or {}
  if #popped == 0 then break end
  for _, id in ipairs(popped) do
    local found = fields_of(message, id)
    -- An interrupted commit or harvest of another program leaves an id whose message is gone.
    if #found > 0 and not seen[id] then
      seen[id] = true
      local size = most and size_of(found) or 0
      if most and size > most then
        -- Not longer and longer: nothing counts the pauses of a message.
        call('ZADD', delayed, text(now + 60000000), id)
        call('HSET', errors, id, 'the body has ' .. text(size) .. ' bytes, more than max_body: set a larger ?max_body=')
        insert(large, id)
      else
        ids[#ids + 1], fields[#fields + 1] = id, found
      end
    end
  end
end
if #ids == 0 then return {0, 0, #large < 1000 and until_due(delayed, now) or 0, {}, {}, ARGV[3], large} end

-- The token rises even if a failover has lost the last increments.
local token = math.max(tonumber(state[3] or 0) + 1, now)
local expires = text(now + tonumber(ARGV[2]))
local scores, holders = {}, {}
for i, id in ipairs(ids) do
  scores[2 * i - 1], scores[2 * i] = expires, id
  holders[2 * i - 1], holders[2 * i] = id, text(token + i - 1) .. ' ' .. ARGV[3]
end
local function claim_all()
  -- It was harvested as a copy while another worker still holds it: it is processed once, by the worker that leased it
  -- last.
  for i, claim in ipairs(call('HMGET', claims, unpack(ids))) do
    if claim then call('LREM', nextlog, 1, ids[i]) end
  end
  call('HSET', meta, 'version', '1', 'fence', text(token + #ids - 1))
  spread('ZADD', leased, scores)
  spread('LPUSH', nextlog, ids)
  spread('HSET', claims, holders)
end

-- If a key has another type, the messages are next in line again.
local function put_all_back()
  for i = #ids, 1, -1 do call('RPUSH', backlog, ids[i]) end
  redis.pcall('ZREM', leased, unpack(ids))
end

local failed = write_or_undo(claim_all, put_all_back)
if failed then return failed end
return {token, tonumber(expires), 0, ids, values_of(tries, enqueued, origins, ids, fields), ARGV[3], large}
