-- Create a queue; pause or resume it.
-- KEYS: meta leased claims wake
-- ARGV: create, down or up
-- RETURNS: 1, or 0 if there is no queue
local meta, leased, claims, wake = unpack(KEYS)
local version = call('HGET', meta, 'version')
if version and version ~= '1' then return too_new(version) end
if ARGV[1] == 'create' then
  if not version then make_queue(meta, leased, claims) end
  return 1
end
if not version then return 0 end
if ARGV[1] == 'down' then
  call('HSET', meta, 'down', '1')
else
  call('HDEL', meta, 'down')
  wake_one(wake)
end
return 1
