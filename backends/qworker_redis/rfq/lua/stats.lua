-- Count a topic.
-- KEYS: meta backlog nextlog message delayed enqueued failed
-- ARGV: none
-- RETURNS: [] if there is none; or [ready, leased, delayed, done, fail, 1 if paused, now us, id of the next in line and
--   when it was enqueued (us; '' if its id contains it)]
local meta, backlog, nextlog, message, delayed, enqueued, failed = unpack(KEYS)
local state = call('HMGET', meta, 'version', 'down')
if state[1] and state[1] ~= '1' then return too_new(state[1]) end
if not is_topic(state[1], backlog, nextlog) then return {} end
local now, oldest = clock(), {}
while take_due(backlog, message, delayed, now, 1000) == 1000 do end
local id = call('LINDEX', backlog, -1)
if id then oldest = {id, call('HGET', enqueued, id) or ''} end
return {
  call('LLEN', backlog), call('LLEN', nextlog), call('ZCARD', delayed), 0, call('ZCARD', failed),
  state[2] and 1 or 0, now, oldest,
}
