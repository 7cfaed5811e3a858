-- Make failed messages ready again, with no tries.
-- KEYS: meta msg sorted errors fail done keys wake
-- ARGV: most messages, then their ids; without any, the oldest ones. Or unchanged, then id and time of the failure in
--   us of each
-- RETURNS: [messages made ready; -1 if there is no queue, then of each message whose key another one has: the key, and
--   the id of the other one]
local meta, msg, sorted, errors, fail, done, keys, wake = unpack(KEYS)
local version = call('HGET', meta, 'version')
if not version then return {-1} end
if version ~= '1' then return too_new(version) end
check_types({sorted, done}, {msg, errors, keys}, {wake})
local count, answer = 0, {}
for _, id in ipairs(selected(fail)) do
  local value = call('ZSCORE', fail, id) and call('HGET', msg, id)
  local key = value and key_of(value)
  local holder = key and other_holder(keys, msg, fail, done, key, value)
  if holder then
    insert(answer, key)
    insert(answer, holder)
  elseif call('ZREM', fail, id) == 1 then
    if value then
      value = with_deaths(struct.pack('>I2', 0) .. string.sub(value, 3), 0)
      call('HSET', msg, id, value)
      call('HDEL', errors, id)
      if key then give_key(keys, key, id, value) end
      make_ready(sorted, id, value)
      count = count + 1
    end
  end
end
if count > 0 then wake_one(wake) end
return {count, unpack(answer)}
