-- Delete finished messages that are unchanged.
-- KEYS: meta msg keys errors fail done
-- ARGV: for each message: state (fail, done), id, when it finished in us
-- RETURNS: messages deleted; -1 if there is no queue
local meta, msg, keys, errors, fail, done = unpack(KEYS)
local version = call('HGET', meta, 'version')
if not version then return -1 end
if version ~= '1' then return too_new(version) end
check_types({fail, done}, {msg, keys, errors}, {})
local sets = {fail = fail, done = done}

local count = 0
for i = 1, #ARGV, 3 do
  local set, id = sets[ARGV[i]], ARGV[i + 1]
  local time = set and call('ZSCORE', set, id)
  if time and tonumber(time) == tonumber(ARGV[i + 2]) then
    call('ZREM', set, id)
    local value = call('HGET', msg, id)
    if value then
      free_key(keys, id, value)
      call('HDEL', msg, id)
    end
    call('HDEL', errors, id)
    count = count + 1
  end
end
return count
