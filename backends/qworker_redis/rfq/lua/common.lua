-- The functions that the scripts of `rfq:` share, in addition to shared.lua.
--
-- The keys of rfq: `backlog`, a list whose tail is next in line; `nextlog`, the ids that are being processed;
-- `message`:<id>, hashes. In addition qworker keeps, by id: `leased` (expiry in microseconds) and `claims` (token and
-- claimant) of its own consumers, `delayed` (due), `failed` (when), `tries`, `errors`, `enqueued` (microseconds, for
-- messages that came from another store), `origins` (their ids there).

local function too_new(version)
  return redis.error_reply('QWTOONEW the topic has format ' .. version)
end

-- Return whether the topic exists, by qworker or by another program.
local function is_topic(version, backlog, nextlog)
  return version or call('EXISTS', backlog, nextlog) > 0
end

-- Delete messages and everything that is kept about them outside of the lists.
local function forget(message, tries, errors, enqueued, origins, ids)
  if #ids == 0 then return 0 end
  local keys = {}
  for i, id in ipairs(ids) do keys[i] = message .. ':' .. id end
  local count = 0
  for first = 1, #keys, 4000 do count = count + call('DEL', unpack(keys, first, math.min(first + 3999, #keys))) end
  for _, hash in ipairs({tries, errors, enqueued, origins}) do
    if call('EXISTS', hash) == 1 then spread('HDEL', hash, ids) end
  end
  return count
end

-- Put messages back to the place from which they were leased, the next in line last: {token, id} each, in any order.
local function put_back(backlog, places)
  table.sort(places, function(a, b) return a[1] > b[1] end)
  local ids = {}
  for i, place in ipairs(places) do ids[i] = place[2] end
  spread('RPUSH', backlog, ids)
end

local function token_of(claim)
  return tonumber(string.match(claim, '^%d+'))
end

-- Move due messages to the end of the line. Return their number.
local function take_due(backlog, message, delayed, now, limit)
  local due = call('ZRANGEBYSCORE', delayed, '-inf', text(now), 'LIMIT', 0, limit)
  if #due == 0 then return 0 end
  local ready = {}
  for _, id in ipairs(due) do
    if call('EXISTS', message .. ':' .. id) == 1 then insert(ready, id) end
  end
  spread('LPUSH', backlog, ready)
  -- Last: if `backlog` has another type, the messages stay delayed.
  spread('ZREM', delayed, due)
  return #due
end

-- Return the fields of a message: the text of an error if the key is not a hash, and empty if there is no key.
local function fields_of(message, id)
  local fields = redis.pcall('HGETALL', message .. ':' .. id)
  return fields.err or fields
end

local function notes_of(hash, ids)
  return #ids > 0 and call('EXISTS', hash) == 1 and call('HMGET', hash, unpack(ids)) or {}
end

-- Return for each message: {tries, enqueued us or '', fields, id elsewhere or ''}.
local function values_of(tries, enqueued, origins, ids, fields)
  local tried, since, former = notes_of(tries, ids), notes_of(enqueued, ids), notes_of(origins, ids)
  local values = {}
  for i = 1, #ids do values[i] = {tonumber(tried[i] or 0), since[i] or '', fields[i], former[i] or ''} end
  return values
end

-- Return the bytes of a message's values. A body in base64 counts as it was published.
local function size_of(fields)
  if type(fields) ~= 'table' then return 0 end
  local size = 0
  for i = 1, #fields, 2 do
    local value = fields[i + 1]
    if fields[i] == 'qworker64' then
      size = size + #value / 4 * 3 - #string.match(value, '=*$')
    else
      size = size + #value
    end
  end
  return size
end
