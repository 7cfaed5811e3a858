-- Count a queue.
-- KEYS: meta msg ready sorted delayed leased fail done gone
-- ARGV: none
-- RETURNS: [] if there is none; or [ready, leased, delayed, done, fail, 1 if paused, now us, values of the oldest ready
--   messages]
local meta, msg, ready, sorted, delayed, leased, fail, done, gone = unpack(KEYS)
local state = call('HMGET', meta, 'version', 'down', 'gone')
if not state[1] then return {} end
if state[1] ~= '1' then return too_new(state[1]) end
local now, removed = clock(), tonumber(state[3] or 0)
-- A count that cannot be right hides no message. The next reap repairs it.
if removed > call('LLEN', ready) then removed = 0 end
while take_due(msg, sorted, delayed, now, 1000) == 1000 do end

local oldest = {}
for digit = 0, 9 do
  local first = call('ZRANGEBYLEX', sorted, '[' .. digit, '(' .. string.char(49 + digit), 'LIMIT', 0, 1)[1]
  local value = first and call('HGET', msg, id_of(first))
  if value then insert(oldest, value) end
end
local rows = list_rows(msg, ready, gone, removed, 1)
if rows[1] then insert(oldest, rows[1][3]) end
return {
  call('LLEN', ready) - removed + call('ZCARD', sorted), call('ZCARD', leased) - 1, call('ZCARD', delayed),
  call('ZCARD', done), call('ZCARD', fail), state[2] and 1 or 0, now, oldest,
}
