-- The functions that the scripts of `redis:` and `rfq:` share. Every key of a script belongs to one queue or topic. A
-- script gets only those parts of this file and of common.lua that it uses (scripts.py), because the server makes each
-- function again in every call. A part ends at an empty line in front of a line that is not indented.

local call = redis.call

local insert = table.insert

-- Return microseconds since 1970 by the clock of this server.
local function clock()
  local now = call('TIME')
  return now[1] * 1000000 + now[2]
end

-- Return a number of microseconds as text: Lua's own conversion keeps only 14 digits.
local function text(number)
  return string.format('%.0f', number)
end

-- Call a command with any number of trailing arguments. Lua's stack holds about 8,000.
local function spread(command, key, arguments)
  for first = 1, #arguments, 4000 do
    call(command, key, unpack(arguments, first, math.min(first + 3999, #arguments)))
  end
end

-- Fail before anything is written if a key has another type: a script that fails later would leave a step half done.
local function check_types(zsets, hashes, lists)
  for _, key in ipairs(zsets) do call('ZCARD', key) end
  for _, key in ipairs(hashes) do call('HGET', key, '') end
  for _, key in ipairs(lists) do call('LLEN', key) end
end

-- Make the writes of a step that nothing has checked, because it is frequent. If one fails, undo the step and return
-- the error.
local function write_or_undo(write, undo)
  local done, problem = pcall(write)
  if done then return end
  undo()
  problem = type(problem) == 'table' and problem.err or problem
  return redis.error_reply(string.match(problem, 'WRONGTYPE.*') or problem)
end

-- Return microseconds until the next message is due, or -1 if no message is delayed.
local function until_due(delayed, now)
  local due = call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
  return due[2] and math.max(0, tonumber(due[2]) - now) or -1
end

-- Return the ids in ARGV, from a place on, that a set has with exactly the time that follows each.
local function as_found(set, first)
  local ids = {}
  for i = first, #ARGV, 2 do
    local time = call('ZSCORE', set, ARGV[i])
    if time and tonumber(time) == tonumber(ARGV[i + 1]) then insert(ids, ARGV[i]) end
  end
  return ids
end

-- Return the ids of failed messages that the arguments of `requeue` select.
local function selected(failed)
  if ARGV[1] == 'unchanged' then return as_found(failed, 2) end
  if #ARGV == 1 then return call('ZRANGE', failed, 0, tonumber(ARGV[1]) - 1) end
  return {unpack(ARGV, 2)}
end

-- Return the answer of an earlier attempt of the same call, kept under `mark` for clients that lost the reply. A
-- sequence number alone stands for the answer {0}.
local function answered(mark, sequence)
  local kept, answer = call('GET', mark)
  if kept and string.byte(kept) > 127 then
    kept, answer = unpack(cmsgpack.unpack(kept))
  end
  if not kept or tonumber(kept) < tonumber(sequence) then return nil end
  -- The network has delivered this attempt late: the client has sent later batches since, so it has an answer.
  if not answer or kept ~= sequence then answer = {0} end
  call('PEXPIRE', mark, 3600000)
  return answer
end

local function remember(mark, sequence, answer)
  local kept = sequence
  if #answer > 1 or answer[1] ~= 0 then kept = cmsgpack.pack({sequence, answer}) end
  call('SET', mark, kept, 'PX', 3600000)
  return answer
end

-- If this server's clock was set since a script has last checked it, let leases keep the time that they had left. `meta`
-- has the time of that check (seen), and which client made it (reaper: id of the start of its host, us since then,
-- seen). A client on the same host knows how much time has passed, and each client knows since its own last reap. Without
-- such a measure, no time has passed: a lease may last longer by that time, but is not taken early.
local function keep_leases(meta, leased, seen, now, here, before, elapsed)
  local TOLERANCE = 10000000
  local boot, at = string.match(here, '^(%S+) (%d+)$')
  local last_boot, last_at, last_seen = string.match(call('HGET', meta, 'reaper') or '', '^(%S+) (%d+) (%d+)$')
  local is_same = boot and boot == last_boot and last_seen == seen
  -- A call that the network has delivered late.
  if is_same and tonumber(at) < tonumber(last_at) then return end
  call('ZREM', leased, '')
  call('HSET', meta, 'seen', text(now), 'reaper', here .. ' ' .. text(now))
  if not seen then return end
  local gap, passed, own = now - tonumber(seen), 0, tonumber(before)
  if gap >= 0 and own and own >= tonumber(seen) and own <= now then
    gap, passed = now - own, tonumber(elapsed)
  elseif gap >= 0 and is_same then
    passed = tonumber(at) - tonumber(last_at)
  elseif gap >= 0 and own and gap <= tonumber(elapsed) + TOLERANCE then
    passed = gap
  end
  local step = gap - passed
  if step >= -TOLERANCE and step <= TOLERANCE or gap >= 0 and step < 0 then return end
  local rows, moved = call('ZRANGE', leased, 0, -1, 'WITHSCORES'), {}
  for i = 1, #rows, 2 do
    -- An anchor never expires.
    if rows[i + 1] ~= 'inf' then
      insert(moved, text(tonumber(rows[i + 1]) + step))
      insert(moved, rows[i])
    end
  end
  spread('ZADD', leased, moved)
end

-- Check the clock before expiries are written. Each reap of a queue with leases does that too.
local function check_clock(meta, leased, seen, now, here)
  if not seen or math.abs(now - tonumber(seen)) > 1000000 then keep_leases(meta, leased, seen, now, here, '', '') end
end

-- Extend the leases in the arguments of `extend` whose claim holds, if the messages are still leased.
local function extend_leases(meta, leased, claims, is_there)
  local now = clock()
  local seen = redis.pcall('HGET', meta, 'seen')
  -- Leases can be extended if `meta` has another type. A deleted queue gets no key.
  if seen and type(seen) ~= 'table' then check_clock(meta, leased, seen, now, ARGV[2]) end
  local expiry = now + tonumber(ARGV[1])
  local ids, scores = {}, {}
  for i = 3, #ARGV, 2 do insert(ids, ARGV[i]) end
  local held = call('HMGET', claims, unpack(ids))
  local answer, expires = {expiry}, text(expiry)
  for i, id in ipairs(ids) do
    if held[i] == ARGV[2 * i + 2] and is_there(id) then
      insert(scores, expires)
      insert(scores, id)
    else
      insert(answer, i)
    end
  end
  -- The first write needs no memory: before Redis 7 a full store lets a script continue that has begun to write.
  call('ZREM', leased, '')
  spread('ZADD', leased, scores)
  return answer
end

-- Return the answer to a call of `settle` that needs no more than that: an earlier one, or none if the call only asks
-- for it.
local function early_answer(earlier)
  if ARGV[2] ~= '' then
    local refused = answered(earlier, ARGV[2])
    if refused then
      refused[1] = 1
      return refused
    end
  end
  if #ARGV == 4 then return {0} end
end

-- End the leases in the arguments of `settle` whose claim holds. `ack_plain` gets the ids of the plain acks, and
-- `finish` gets each other one. Return the answer.
local function end_leases(leased, claims, ack_plain, finish)
  -- The first write needs no memory: before Redis 7 a full store lets a script continue that has begun to write.
  call('ZREM', leased, '')
  local answer, plain = {0}, tonumber(ARGV[4])
  if plain > 0 then
    local ids, held = {}, {}
    for i = 1, plain do ids[i] = ARGV[3 + 2 * i] end
    local found = call('HMGET', claims, unpack(ids))
    for i, id in ipairs(ids) do
      if found[i] == ARGV[4 + 2 * i] then held[#held + 1] = id else insert(answer, i) end
    end
    spread('ZREM', leased, held)
    spread('HDEL', claims, held)
    ack_plain(held)
  end
  local number = plain
  for i = 5 + 2 * plain, #ARGV, 6 do
    number = number + 1
    local id, claim = ARGV[i + 1], ARGV[i + 2]
    if call('HGET', claims, id) == claim then
      -- The lease ends last: if a key has another type, the message stays leased.
      finish(ARGV[i], id, claim, tonumber(ARGV[i + 3]), ARGV[i + 4], ARGV[i + 5])
      call('ZREM', leased, id)
      call('HDEL', claims, id)
    else
      insert(answer, number)
    end
  end
  return answer
end

local function keep_error(errors, id, reason)
  if reason ~= '' then call('HSET', errors, id, reason) else call('HDEL', errors, id) end
end

-- End the leases of the claimant in ARGV, and return their ids and their claims. A call of that claimant that is still
-- on its way claims nothing from now on.
local function end_call(leased, claims, void)
  call('ZREM', leased, '')
  call('SET', void, '1', 'PX', ARGV[2])
  local held, ids, found = call('HGETALL', claims), {}, {}
  for i = 1, #held, 2 do
    local space = string.find(held[i + 1], ' ', 1, true)
    if space and string.sub(held[i + 1], space + 1) == ARGV[1] then
      insert(ids, held[i])
      insert(found, held[i + 1])
    end
  end
  spread('ZREM', leased, ids)
  spread('HDEL', claims, ids)
  return ids, found
end

-- In `reap`: return the numbers of the leases, in ARGV from a place on as id and claim, that are not held.
local function lost_leases(claims, first)
  local ids, lost = {}, {}
  for i = first, #ARGV, 2 do insert(ids, ARGV[i]) end
  local held = #ids > 0 and call('HMGET', claims, unpack(ids)) or {}
  for i in ipairs(ids) do
    if held[i] ~= ARGV[first + 2 * i - 1] then insert(lost, i) end
  end
  return lost
end

-- In `reap`: remove from a set the finished messages whose retention has ended, or that are too many. Return their ids.
local function take_old(set, age, most, now, limit)
  local old = {}
  if age ~= '' then
    old = call('ZRANGEBYSCORE', set, '-inf', text(now - tonumber(age)), 'LIMIT', 0, limit)
  elseif most ~= '' then
    local excess = call('ZCARD', set) - tonumber(most)
    if excess > 0 then old = call('ZRANGE', set, 0, math.min(excess, limit) - 1) end
  end
  spread('ZREM', set, old)
  return old
end

-- Compare byte by byte, as Redis orders members of one score: Lua's own comparison depends on the server's language.
local function precedes(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- In `look`: return how many members are before a time and an id, which may be gone; and 1 if they are present.
local function rank_of(set, time, id)
  local score = call('ZSCORE', set, id)
  if score and tonumber(score) == tonumber(time) then return call('ZRANK', set, id), 1 end
  local low, high = call('ZCOUNT', set, '-inf', '(' .. time), call('ZCOUNT', set, '-inf', time)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if precedes(call('ZRANGE', set, middle, middle)[1], id) then low = middle + 1 else high = middle end
  end
  return low, 0
end

-- Return a page of a sorted set, in which members and scores alternate, and whether it is the last page.
local function timed_page(set, limit, newest, time, id)
  local size = call('ZCARD', set)
  local start, stop
  if newest then
    stop = (time and rank_of(set, time, id) or size) - 1
    start = math.max(0, stop - limit + 1)
  else
    start = 0
    if time then
      local rank, there = rank_of(set, time, id)
      start = rank + there
    end
    stop = start + limit - 1
  end
  if stop < start then return {}, true end
  local rows, out = call('ZRANGE', set, start, stop, 'WITHSCORES'), {}
  if newest then
    for i = #rows - 1, 1, -2 do
      insert(out, rows[i])
      insert(out, rows[i + 1])
    end
  else
    out = rows
  end
  return out, (newest and start or size - 1 - stop) <= 0
end
