-- Create a topic; pause or resume it for qworker's consumers.
-- KEYS: meta backlog nextlog
-- ARGV: create, down or up
-- RETURNS: 1, or 0 if there is no such topic
local meta, backlog, nextlog = unpack(KEYS)
local version = call('HGET', meta, 'version')
if version and version ~= '1' then return too_new(version) end
if ARGV[1] ~= 'create' and not is_topic(version, backlog, nextlog) then return 0 end
if not version then call('HSET', meta, 'version', '1') end
if ARGV[1] == 'down' then call('HSET', meta, 'down', '1') end
if ARGV[1] == 'up' then call('HDEL', meta, 'down') end
return 1
