-- Make failed messages ready again, with no tries.
-- KEYS: meta msg sorted errors fail keys wake
-- ARGV: most messages, then their ids; without any, the oldest ones. Or unchanged, then id and time of the failure in
--   us of each
-- RETURNS: messages made ready; -1 if there is no queue
local meta, msg, sorted, errors, fail, keys, wake = unpack(KEYS)
local version = call('HGET', meta, 'version')
if not version then return -1 end
if version ~= '1' then return too_new(version) end
check_types({sorted}, {msg, errors, keys}, {wake})
local count = 0
for _, id in ipairs(selected(fail)) do
  if call('ZREM', fail, id) == 1 then
    local value = call('HGET', msg, id)
    if value then
      value = with_deaths(struct.pack('>I2', 0) .. string.sub(value, 3), 0)
      call('HSET', msg, id, value)
      call('HDEL', errors, id)
      local key = key_of(value)
      if key then call('HSET', keys, key, id) end
      make_ready(sorted, id, value)
      count = count + 1
    end
  end
end
if count > 0 then wake_one(wake) end
return count
