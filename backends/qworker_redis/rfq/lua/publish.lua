-- Store messages: HSET and LPUSH, as rfq does, or RPUSH for the front; delayed ones wait separately. It is the only
-- script that a full store refuses.
-- KEYS: meta backlog message delayed tries enqueued origins mark
-- ARGV: sequence, 1 if an earlier attempt may have been made, then for each message: id, special, fields
--   special: '' for a message with nothing unusual and an id that is new, or tries (2 bytes), delay us (8), due us (8;
--     0: none), enqueued us (8; 0: now), 1 for the front (1), big-endian, and its id in another store
--   fields: name, value, name, value ..., each after its length (4 bytes)
-- RETURNS: [1 if the topic is new]
local meta, backlog, message, delayed, tries, enqueued, origins, mark = unpack(KEYS)
local sequence = ARGV[1]
-- Also for a first attempt: the network may deliver it late, when its repetition was stored, leased and acked.
local earlier = answered(mark, sequence)
if earlier then return earlier end
local version = call('HGET', meta, 'version')
if version and version ~= '1' then return too_new(version) end
-- A key of another type must fail here, before anything is written.
call('LLEN', backlog)
local checked = false

local now, line, front = clock(), {}, {}

local function note(hash, id, value)
  if value then call('HSET', hash, id, value) end
end

local function place(id, special)
  if special == '' then return insert(line, id) end
  local tried, delay, due, since, first = struct.unpack('>I2I8I8I8B', special)
  local origin = string.sub(special, 28)
  note(tries, id, tried > 0 and tried)
  note(enqueued, id, since > 0 and text(since))
  note(origins, id, origin ~= '' and origin)
  if due == 0 then due = now + delay end
  if due > now then
    call('ZADD', delayed, text(due), id)
  elseif first == 1 then
    insert(front, 1, id)
  else
    insert(line, id)
  end
end

local function fields_of(packed)
  local fields, count, at, part = {}, 0, 1
  while at <= #packed do
    part, at = struct.unpack('>I4c0', packed, at)
    count = count + 1
    fields[count] = part
  end
  return fields
end

for i = 3, #ARGV, 3 do
  local id, key = ARGV[i], message .. ':' .. ARGV[i]
  local new = ARGV[i + 1] == '' and ARGV[2] == '0'
  if new or call('EXISTS', key) == 0 then
    if ARGV[i + 1] ~= '' and not checked then
      check_types({delayed}, {tries, enqueued, origins}, {})
      checked = true
    end
    spread('HSET', key, fields_of(ARGV[i + 2]))
    place(id, ARGV[i + 1])
  end
end
if not version then call('HSET', meta, 'version', '1') end
spread('LPUSH', backlog, line)
spread('RPUSH', backlog, front)
return remember(mark, sequence, {version and 0 or 1})
