-- Find the delayed messages whose values are larger than `max_body`, for `qworker doctor`. It reads values only of
-- messages for which the padding of base64 decides.
-- KEYS: message delayed
-- ARGV: most bytes of a body
-- RETURNS: pairs of an id and the bytes of its values
local message, delayed = unpack(KEYS)
local most, found = tonumber(ARGV[1]), {}

-- Return the bytes of a message's values, and up to two more for a body in base64; 0 if it is not a message.
local function rough_size(id)
  local key, size = message .. ':' .. id, 0
  local names = redis.pcall('HKEYS', key)
  for _, name in ipairs(names.err and {} or names) do
    local bytes = call('HSTRLEN', key, name)
    size = size + (name == 'qworker64' and bytes / 4 * 3 or bytes)
  end
  return size
end

for _, id in ipairs(call('ZRANGE', delayed, 0, 999)) do
  local size = rough_size(id)
  if size > most and size - 2 <= most then size = size_of(fields_of(message, id)) end
  if size > most then
    insert(found, id)
    insert(found, size)
  end
end
return found
