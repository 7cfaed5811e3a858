-- The functions that the scripts of `redis:` share, in addition to shared.lua.
--
-- A message's value in the hash `msg`: tries (2 bytes), order (8 bytes, microseconds: when it was published, made
-- unique by its place in its batch), priority (1 byte), flags (1 byte), then the part that only clients read.
-- Big-endian. The six high bits of the flags are the deaths, which older releases ignore and keep. `ready` is a
-- list of ids: fresh messages of priority 0 in the order published. Every other ready message is in `sorted`, a sorted
-- set of one score, whose members begin with 9 - priority and the order: first the higher priority, then the older one.
-- `gone` counts, by id, how often `ready` still names a message that was removed; meta.gone is their sum.

-- Return the place of a message among the ready ones, which is also the member of `sorted`.
local function place(id, value)
  local order = struct.unpack('>I8', value, 3)
  return string.format('%d%017.0f', 9 - string.byte(value, 11), order) .. id
end

local function id_of(member)
  return string.sub(member, 19)
end

-- Return the values of any number of messages, false for missing ones.
local function read(msg, ids)
  if #ids <= 4000 then return #ids > 0 and call('HMGET', msg, unpack(ids)) or {} end
  local values = {}
  for first = 1, #ids, 4000 do
    local some = call('HMGET', msg, unpack(ids, first, math.min(first + 3999, #ids)))
    for _, value in ipairs(some) do insert(values, value) end
  end
  return values
end

-- Return the key of a value, if it has one.
local function key_of(value)
  if string.byte(value, 12) % 2 == 1 then
    local length = string.byte(value, 13)
    return string.sub(value, 14, 13 + length)
  end
end

-- The network may deliver a publish when its client is gone, and when another client has published the same id, and that
-- message was leased and acked. So `holds` also has each id that a client was given, after a ~: for this time (us) from
-- its last publish. A call that began before that publish stores nothing. The client does not know exactly when its call
-- began. It sends an earlier time of this server, from its last answer. If that does not tell, it calls again, and can
-- say when it began from the answer.
local LATE = 60000000

-- Return whether a client's time of this server can be compared with the last publish.
local function is_time(before, now)
  return before <= now + 1 and before > now - LATE
end

-- Return whether a call with an id that is not stored may have begun before the last publish of that id.
local function may_be_late(holds, id, before, now)
  if not is_time(before, now) then return true end
  local ends = call('ZSCORE', holds, '~' .. id)
  local last = ends and tonumber(ends) - LATE
  -- If the last publish is later than now, the clock was set back in between. A time before that is not valid above.
  return last and last >= before and last <= now
end

local function note_publish(holds, id, now)
  call('ZADD', holds, text(now + LATE), '~' .. id)
end

-- The keys that count in all queues: a hash that belongs to no queue, and so to another slot than theirs. No message has
-- such a key in a cluster. Its values are a queue, a slash and an id, which have no slashes.
local APP_KEYS = '{qworker:}:appkeys'

local function in_queue(keys, id)
  return string.match(keys, '^{qworker:(.*)}:keys$') .. '/' .. id
end

-- Return the options of the key of a value: `a` if it counts in all queues, `s` if it is free from the first lease on.
local function key_options(value)
  if string.byte(value, 12) % 4 ~= 3 then return '' end
  local at = 14 + string.byte(value, 13)
  local length = struct.unpack('>I4', value, at)
  return cmsgpack.unpack(string.sub(value, at + 4, at + 3 + length))[4] or ''
end

local function is_app_key(value)
  return string.find(key_options(value), 'a', 1, true) ~= nil
end

-- Release the key of a message if the message is the pending one of it.
local function free_key(keys, id, value)
  local key = value and key_of(value)
  if not key then return end
  if is_app_key(value) then
    if call('HGET', APP_KEYS, key) == in_queue(keys, id) then call('HDEL', APP_KEYS, key) end
  elseif call('HGET', keys, key) == id then
    call('HDEL', keys, key)
  end
end

local function give_key(keys, key, id, value)
  if is_app_key(value) then
    call('HSET', APP_KEYS, key, in_queue(keys, id))
  else
    call('HSET', keys, key, id)
  end
end

-- Return the id of the message that has a key. An older release can have left the key of a message that has finished.
local function holder_of(keys, msg, fail, done, key)
  local id = call('HGET', keys, key)
  if not id or call('HEXISTS', msg, id) == 0 or call('ZSCORE', fail, id) or call('ZSCORE', done, id) then return nil end
  return id
end

-- Return the message that has the key of a value, as the client gets it: its id, or its queue, a slash and its id.
local function other_holder(keys, msg, fail, done, key, value)
  if not is_app_key(value) then return holder_of(keys, msg, fail, done, key) end
  local found = call('HGET', APP_KEYS, key)
  if not found then return nil end
  local queue, id = string.match(found, '^([^/]*)/(.*)$')
  local there = '{qworker:' .. queue .. '}:'
  if call('HEXISTS', there .. 'msg', id) == 0 then return nil end
  if call('ZSCORE', there .. 'fail', id) or call('ZSCORE', there .. 'done', id) then return nil end
  return there .. 'keys' == keys and id or found
end

-- Return whether the key of a value is free from the first lease of its message on.
local function is_free_when_started(value)
  return string.find(key_options(value), 's', 1, true) ~= nil
end

-- Return whether the error that is kept of a failed message says that it was cancelled.
local function is_cancelled(errors, id)
  return string.sub(call('HGET', errors, id) or '', 1, 16) == 'code: cancelled\n'
end

local function make_ready(sorted, id, value)
  call('ZADD', sorted, 0, place(id, value))
end

-- Return a value with its deaths set.
local function with_deaths(value, deaths)
  local flags = string.byte(value, 12)
  if flags < 4 and deaths == 0 then return value end
  return string.sub(value, 1, 11) .. string.char(flags % 4 + 4 * math.min(deaths, 63)) .. string.sub(value, 13)
end

-- Return a value after a failed attempt: one that ended by itself ends the row of deaths.
local function one_more_try(value, died)
  local tries = struct.unpack('>I2', value)
  value = with_deaths(value, died and math.floor(string.byte(value, 12) / 4) + 1 or 0)
  return struct.pack('>I2', math.min(tries + 1, 65535)) .. string.sub(value, 3)
end

-- Take a message out of its state, which is one of some sets or ready. Return the state, and how many rows of `ready` this
-- leaves without a message.
local function take_out(sets, sorted, claims, gone, id, value)
  for state, set in pairs(sets) do
    if call('ZREM', set, id) == 1 then
      call('HDEL', claims, id)
      return state, 0
    end
  end
  if call('ZREM', sorted, place(id, value)) == 1 then return 'ready', 0 end
  -- A list is searched from its end to find a row, so leave the row, and record that it has no meaning.
  call('HINCRBY', gone, id, 1)
  return 'ready', 1
end

-- Make due messages ready. Return their number.
local function take_due(msg, sorted, delayed, now, limit)
  local due = call('ZRANGEBYSCORE', delayed, '-inf', text(now), 'LIMIT', 0, limit)
  if #due > 0 then
    local values = read(msg, due)
    for i, id in ipairs(due) do
      if values[i] then make_ready(sorted, id, values[i]) end
    end
    -- Last: if `sorted` has another type, the messages stay delayed.
    spread('ZREM', delayed, due)
  end
  return #due
end

-- Wake one waiting client. One is enough, because a client that leases and leaves something wakes the next one.
local function wake_one(wake)
  if call('LLEN', wake) == 0 then call('RPUSH', wake, '1') end
end

-- Delay a message. Return whether it is the earliest one: then clients that wait for it must be woken.
local function make_delayed(delayed, id, due)
  local first = call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
  call('ZADD', delayed, text(due), id)
  return not first[1] or due < tonumber(first[2])
end

-- Create a queue. Redis keeps small sets and hashes in a compact form that it searches from the beginning, at about 3
-- us per leased message. One member that is too long for that form, has no meaning and never expires keeps `leased` and
-- `claims` out of it.
local ANCHOR = string.rep('-', 65)

local function make_queue(meta, leased, claims)
  call('HSET', meta, 'version', '1')
  call('ZADD', leased, '+inf', ANCHOR)
  call('HSET', claims, ANCHOR, ANCHOR)
end

local function too_new(version)
  return redis.error_reply('QWTOONEW the queue has format ' .. version)
end

-- The rows of removed messages that one call passes over at most, which takes about 1 ms.
local MOST_STALE = 1000

-- Return the rows of `ready` from its front, until there are `limit` messages among them: the messages as {row number,
-- id, value}, the numbers of the rows of removed messages, and the ids of all rows.
local function list_rows(msg, ready, gone, removed, limit)
  local rows, stale, heads, left = {}, {}, {}, {}
  local most = limit + math.min(math.max(removed, 0), MOST_STALE)
  while #rows < limit and #heads < most do
    local first, numbers, ids = #heads, {}, {}
    local some = call('LRANGE', ready, first, math.min(2 * first + limit, most) - 1)
    if #some == 0 then break end
    local counts = removed > 0 and read(gone, some) or {}
    for i, id in ipairs(some) do
      heads[first + i] = id
      if not left[id] then left[id] = tonumber(counts[i] or 0) end
      if left[id] > 0 then
        left[id] = left[id] - 1
        insert(stale, first + i)
      else
        insert(numbers, first + i)
        insert(ids, id)
      end
    end
    for i, value in ipairs(read(msg, ids)) do
      if value then insert(rows, {numbers[i], ids[i], value}) end
    end
  end
  return rows, stale, heads
end

-- Return the first `limit` ready messages in their order, unchanged: ids, values, their members of `sorted`, and how
-- many rows of `ready` end with the last of them.
local function first_ready(msg, ready, sorted, gone, removed, limit)
  local rows, stale, heads = list_rows(msg, ready, gone, removed, limit)
  local members = call('ZRANGE', sorted, 0, limit - 1)
  local ids = {}
  for i, member in ipairs(members) do ids[i] = id_of(member) end
  local values = read(msg, ids)
  local out = {ids = {}, values = {}, members = {}, rows = 0, stale = stale, heads = heads}
  local i, j = 1, 1
  while #out.ids < limit and (members[i] or rows[j]) do
    local row = rows[j]
    if row and (not members[i] or place(row[2], row[3]) < members[i]) then
      insert(out.ids, row[2])
      insert(out.values, row[3])
      out.rows = row[1]
      j = j + 1
    else
      insert(out.members, members[i])
      if values[i] then
        insert(out.ids, ids[i])
        insert(out.values, values[i])
      end
      i = i + 1
    end
  end
  -- Removed messages at the end are taken off with the last row.
  if not rows[j] then out.rows = #heads end
  return out
end

-- Take the first rows off the list. The removed messages among them, in the rows `stale`, are not counted any more.
local function take_rows(meta, ready, gone, heads, stale, last)
  if last == 0 then return end
  call('LTRIM', ready, last, -1)
  local passed, ids, over, number = {}, {}, {}, 0
  for _, row in ipairs(stale) do
    if row > last then break end
    local id = heads[row]
    if not passed[id] then insert(ids, id) end
    passed[id] = (passed[id] or 0) + 1
    number = number + 1
  end
  if number == 0 then return end
  for i, count in ipairs(read(gone, ids)) do
    local left = tonumber(count or 0) - passed[ids[i]]
    if left > 0 then call('HSET', gone, ids[i], left) else insert(over, ids[i]) end
  end
  spread('HDEL', gone, over)
  call('HINCRBY', meta, 'gone', -number)
end

-- Take rows of removed messages off the list: those at its front; and if they are most of the list, all of them. Then
-- the messages between them go to `sorted`, which has the same order. One call takes about 1 ms. Return whether there is
-- more to do.
local function tidy_ready(meta, msg, ready, sorted, gone, removed)
  if removed <= 0 then return false end
  local size = call('LLEN', ready)
  if size == 0 then
    call('UNLINK', gone)
    call('HDEL', meta, 'gone')
    return false
  end
  local all = removed * 4 > size * 3
  local rows, stale, heads = list_rows(msg, ready, gone, removed, all and 250 or 1)
  local last = #heads
  if all then
    for _, row in ipairs(rows) do make_ready(sorted, row[2], row[3]) end
  elseif rows[1] then
    last = rows[1][1] - 1
  end
  take_rows(meta, ready, gone, heads, stale, last)
  return last > 0
end

-- Return the number of ready messages.
local function count_ready(meta, ready, sorted)
  return call('LLEN', ready) - tonumber(call('HGET', meta, 'gone') or 0) + call('ZCARD', sorted)
end

-- Return the bytes of the body in a value.
local function body_size(value)
  local at, flags = 12, string.byte(value, 12)
  if flags % 2 == 1 then at = at + 1 + string.byte(value, 13) end
  if flags % 4 > 1 then at = at + 4 + struct.unpack('>I4', value, at + 1) end
  return #value - at
end

-- Delay the messages whose bodies have more than `most` bytes, and return the others. A pause is as long as the message
-- has waited since it was published, from one minute to ten. So pauses grow, and nothing has to be counted.
local function delay_large(errors, delayed, ids, values, most, now, large)
  local left, kept = {}, {}
  for i, id in ipairs(ids) do
    local value = values[i]
    local size = value and #value > most and body_size(value) or 0
    if size > most then
      local pause = math.max(60000000, math.min(now - struct.unpack('>I8', value, 3), 600000000))
      call('ZADD', delayed, text(now + pause), id)
      call('HSET', errors, id, 'the body has ' .. text(size) .. ' bytes, more than max_body: set a larger ?max_body=')
      insert(large, id)
    else
      insert(left, id)
      insert(kept, value)
    end
  end
  return left, kept
end

-- Return a cell that has not expired: its version, when it expires ('-' never), its rank, what is stored, and where its
-- value begins there. What has no such form was not stored by qworker.
local function read_cell(cells, member, now)
  local stored = call('HGET', cells, member)
  if not stored then return nil end
  local version, due, rank, at = string.match(stored, '^(%S+) ([-%d]+) (-?%d+)\n()')
  if not version or due ~= '-' and tonumber(due) <= now then return nil end
  return {version = version, due = due, rank = rank, stored = stored, at = at}
end
