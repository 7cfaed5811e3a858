-- Make failed messages ready again, with no tries.
-- KEYS: meta backlog message tries errors failed
-- ARGV: most messages, then their ids; without any, the oldest ones. Or unchanged, then id and time of the failure in
--   us of each
-- RETURNS: messages made ready; -1 if there is no such topic
local meta, backlog, message, tries, errors, failed = unpack(KEYS)
local version = call('HGET', meta, 'version')
if not version then return call('EXISTS', backlog) == 1 and 0 or -1 end
if version ~= '1' then return too_new(version) end
check_types({failed}, {tries, errors}, {backlog})
local ready = {}
for _, id in ipairs(selected(failed)) do
  if call('ZREM', failed, id) == 1 and call('EXISTS', message .. ':' .. id) == 1 then insert(ready, id) end
end
if #ready > 0 then
  spread('HDEL', tries, ready)
  spread('HDEL', errors, ready)
  spread('LPUSH', backlog, ready)
end
return #ready
