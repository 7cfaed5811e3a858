-- Return when there may be a message to lease, for a client that is about to wait.
-- KEYS: meta ready sorted delayed wake
-- ARGV: 1 to pass on a wake-up that this client took and did not use
-- RETURNS: us until there is something to lease: 0 now, -1 not known
local meta, ready, sorted, delayed, wake = unpack(KEYS)
local state = call('HMGET', meta, 'version', 'down')
-- A client must not block on it together with the lists of other queues if it has another type.
check_types({}, {}, {wake})
if not state[1] or state[2] then return -1 end
if count_ready(meta, ready, sorted) > 0 then
  if ARGV[1] == '1' then wake_one(wake) end
  return 0
end
return until_due(delayed, clock())
