-- Store messages: ready, or delayed until they are due. It is the only script that a full store refuses.
-- KEYS: meta msg ready sorted delayed leased claims keys errors fail done gone wake holds mark
-- ARGV: sequence, what this server's clock was before the call began (us; = in front of it: when it began), then for
--   each message: id, special, rest
--   special: '' for a message with nothing unusual; i if the client was given its id; or tries (2 bytes), delay us (8),
--     due us (8; 0: none), priority (1; 64 more if the client was given the id; 128 more if this is next: us for which
--     the id stays taken (8); 32 more if this is next: what is done if a message that waits has the key (1; 1: replace
--     it, 2: debounce it; 4 more: the key is free when the message is leased; 8 more: it counts in all queues), us to wait (8), us at most (8; 0: any)),
--     big-endian, and the key
--   rest: the value without its tries and order
-- RETURNS: [1 if the queue is new, then pairs of a message's number and the id that is stored instead of it]; or
--   [-now us] if nothing was done, because this may be a request that the network has delivered late: its client calls
--   again with that time
local meta, msg, ready, sorted, delayed, leased, claims, keys, errors, fail, done, gone, wake, holds, mark = unpack(KEYS)
local sequence, is_exact = ARGV[1], string.byte(ARGV[2]) == 61
local before = tonumber(is_exact and string.sub(ARGV[2], 2) or ARGV[2])
-- Also for a first attempt: the network may deliver it late, when its repetition was stored, leased and acked.
local earlier = answered(mark, sequence)
if earlier then return earlier end
local version = call('HGET', meta, 'version')
if version and version ~= '1' then return too_new(version) end

local now = clock()
local ids, given, held = {}, {}, {}
local has_special, has_app_key = false, false
for i = 1, (#ARGV - 2) / 3 do
  ids[i] = ARGV[3 * i]
  local special = ARGV[3 * i + 1]
  local priority = string.byte(special, 19)
  given[i] = special == 'i' or priority and priority % 128 > 63
  if priority then
    has_special = true
    has_app_key = has_app_key or priority % 64 > 31 and string.byte(special, priority > 127 and 28 or 20) > 7
  end
end
local stored = call('HMGET', msg, unpack(ids))
local is_late = false
for i, id in ipairs(ids) do
  if given[i] then
    local ends = call('ZSCORE', holds, id)
    held[i] = ends and tonumber(ends) > now
    if not stored[i] and not held[i] and may_be_late(holds, id, before, now) then
      held[i] = is_exact and is_time(before, now)
      is_late = is_late or not held[i]
    end
  end
end
if is_late then return {-now - 1} end
if has_special then
  -- Before the first change: a batch that is refused leaves nothing behind.
  local hashes = {msg, keys, claims, errors, gone, has_app_key and APP_KEYS or nil}
  check_types({sorted, delayed, holds, leased, fail, done}, hashes, {ready, wake})
end
local answer = {version and 0 or 1}
local sets, rows, awake = {}, {}, false

-- Let a message wait until it is due, or be ready. It is stored at once: a later one of the same batch may have its key.
local function put_waiting(id, value, due)
  call('HSET', msg, id, value)
  if due > now then
    awake = make_delayed(delayed, id, due) or awake
  else
    make_ready(sorted, id, value)
    awake = true
  end
end

-- Return a value's part for clients with the time of this publish, if it has no other one: the order is that of the first
-- call. The part that few messages have is an array, which begins with the time: nil, or a double (see codec.py).
local function with_time(rest)
  local after_key = 4 + string.byte(rest, 3)
  local head, flags = string.sub(rest, 3, after_key - 1), string.byte(rest, 2)
  local extra, body = '\148\192\144\192\160', string.sub(rest, after_key)
  if flags % 4 > 1 then
    local length = struct.unpack('>I4', body)
    extra, body = string.sub(body, 5, 4 + length), string.sub(body, 5 + length)
    if string.byte(extra, 2) ~= 192 then return rest end
  else
    flags = flags + 2
  end
  extra = string.sub(extra, 1, 1) .. '\203' .. struct.pack('>d', now / 1000000) .. string.sub(extra, 3)
  return string.sub(rest, 1, 1) .. string.char(flags) .. head .. struct.pack('>I4', #extra) .. extra .. body
end

-- Put a message in the place of one that waits. It keeps the id, the place in the order, and the longer hold.
local function replace(id, rest, due, again, wait, most, hold)
  local value = call('HGET', msg, id)
  if again == 2 then
    due = now + wait
    if most > 0 then due = math.max(now, math.min(due, struct.unpack('>I8', value, 3) + most)) end
  end
  local _, left = take_out({delayed = delayed}, sorted, claims, gone, id, value)
  if left > 0 then call('HINCRBY', meta, 'gone', left) end
  call('HDEL', errors, id)
  local held_until = tonumber(call('ZSCORE', holds, id) or 0)
  if hold > 0 and held_until < now + hold then call('ZADD', holds, text(now + hold), id) end
  put_waiting(id, struct.pack('>I2', 0) .. string.sub(value, 3, 10) .. with_time(rest), due)
end

local function put_special(i, id)
  local special = ARGV[3 * i + 1]
  local tries, delay, due, priority, at = struct.unpack('>I2I8I8B', special)
  local hold = 0
  if priority > 127 then
    priority = priority - 128
    hold, at = struct.unpack('>I8', special, at)
  end
  priority = priority % 64
  local again, wait, most = 0, 0, 0
  if priority > 31 then
    priority = priority - 32
    again, wait, most, at = struct.unpack('>BI8I8', special, at)
    if again > 7 then again = again - 8 end
    if again > 3 then
      again = again - 4
      call('HSET', meta, 'started', '1')
    end
  end
  local key = string.sub(special, at)
  if due == 0 then due = now + delay end
  if again == 2 then due = now + wait end
  local value = struct.pack('>I2I8', tries, now + i) .. ARGV[3 * i + 2]
  if key ~= '' then
    local holder = other_holder(keys, msg, fail, done, key, value)
    if holder and (again == 0 or not call('ZSCORE', leased, holder)) then
      insert(answer, i)
      insert(answer, holder)
      if again > 0 then replace(holder, ARGV[3 * i + 2], due, again, wait, most, hold) end
      return
    end
    give_key(keys, key, id, value)
  end
  if hold > 0 then call('ZADD', holds, text(now + hold), id) end
  if key ~= '' then return put_waiting(id, value, due) end
  insert(sets, id)
  insert(sets, value)
  if due > now then
    awake = make_delayed(delayed, id, due) or awake
  elseif priority > 0 then
    make_ready(sorted, id, value)
    awake = true
  else
    insert(rows, id)
  end
end

for i = 1, #ids do
  local id = ids[i]
  if given[i] then note_publish(holds, id, now) end
  if not stored[i] and not held[i] then
    local special = ARGV[3 * i + 1]
    if special == '' or special == 'i' then
      local last = #sets
      sets[last + 1], sets[last + 2] = id, struct.pack('>I2I8', 0, now + i) .. ARGV[3 * i + 2]
      rows[#rows + 1] = id
    else
      put_special(i, id)
    end
  end
end
if not version then make_queue(meta, leased, claims) end
-- The list may have another type. A message that is stored in no state would never run.
spread('RPUSH', ready, rows)
spread('HSET', msg, sets)
if awake or #rows > 0 then wake_one(wake) end
return remember(mark, sequence, answer)
