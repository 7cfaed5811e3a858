-- Publish the first rows of a staged list. They leave it in the same step, so that the rows in it are those that are
-- not published yet.
-- KEYS: meta msg ready sorted delayed leased claims keys fail done wake staged
-- ARGV: rows at most, how many the list had at first, what the ids begin with: the number of the row follows
-- RETURNS: [1 if the queue is new, how many rows are left]
local meta, msg, ready, sorted, delayed, leased, claims, keys, fail, done, wake, staged = unpack(KEYS)
local version = call('HGET', meta, 'version')
if version and version ~= '1' then return too_new(version) end
local rows = call('LRANGE', staged, 0, tonumber(ARGV[1]) - 1)
local left = call('LLEN', staged)
if left == 0 then return {0, 0} end
check_types({sorted, delayed, fail, done}, {msg, keys}, {ready, wake})
local first, head = tonumber(ARGV[2]) - left, ARGV[3]
local now = clock()

local ids = {}
for i = 1, #rows do ids[i] = head .. text(first + i - 1) end
local stored = call('HMGET', msg, unpack(ids))
local sets, plain, awake = {}, {}, false
-- The keys of this call's messages, which are not stored yet.
local own = {}

local function put_special(i, id, length)
  local special = string.sub(rows[i], 3, 2 + length)
  local tries, delay, due, priority = struct.unpack('>I2I8I8B', special)
  local key = string.sub(special, 20)
  if key ~= '' then
    if own[key] or holder_of(keys, msg, fail, done, key) then return end
    call('HSET', keys, key, id)
    own[key] = true
  end
  local value = struct.pack('>I2I8', tries, now + i) .. string.sub(rows[i], 3 + length)
  insert(sets, id)
  insert(sets, value)
  if due == 0 then due = now + delay end
  if due > now then
    awake = make_delayed(delayed, id, due) or awake
  elseif priority > 0 then
    make_ready(sorted, id, value)
    awake = true
  else
    insert(plain, id)
  end
end

for i = 1, #ids do
  if not stored[i] then
    local length = struct.unpack('>I2', rows[i])
    if length == 0 then
      sets[#sets + 1] = ids[i]
      sets[#sets + 1] = struct.pack('>I2I8', 0, now + i) .. string.sub(rows[i], 3)
      plain[#plain + 1] = ids[i]
    else
      put_special(i, ids[i], length)
    end
  end
end
if not version then make_queue(meta, leased, claims) end
spread('HSET', msg, sets)
spread('RPUSH', ready, plain)
call('LTRIM', staged, #rows, -1)
if awake or #plain > 0 then wake_one(wake) end
return {version and 0 or 1, left - #rows}
