-- Find the delayed messages whose values are larger than `max_body`, for `qworker doctor`. It reads no value.
-- KEYS: msg delayed
-- ARGV: most bytes of a value
-- RETURNS: pairs of an id and the bytes of its value
local msg, delayed = unpack(KEYS)
local found = {}
for _, id in ipairs(call('ZRANGE', delayed, 0, 999)) do
  local size = call('HSTRLEN', msg, id)
  if size > tonumber(ARGV[1]) then
    insert(found, id)
    insert(found, size)
  end
end
return found
