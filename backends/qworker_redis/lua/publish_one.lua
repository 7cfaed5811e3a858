-- Store one message with nothing unusual in an existing queue, as most calls do. This is a separate script, because a
-- server spends more on the keys, the arguments and the functions of `publish` than on the message.
-- KEYS: meta msg ready wake holds mark
-- ARGV: sequence, id, rest: as in `publish`; and if the client was given the id, what this server's clock was before
-- RETURNS: 0, or now us if the client was given the id; 1 or -now us if nothing was done, and `publish` must do it.
--   `publish` also makes repeated attempts.
if call('HGET', KEYS[1], 'version') ~= '1' then return 1 end
local id, now, holds, before = ARGV[2], call('TIME'), KEYS[5], tonumber(ARGV[4])
now = now[1] * 1000000 + now[2]
if before then
  -- This is `may_be_late`. A function would cost each call that has no given id, too.
  local last, held = call('ZSCORE', holds, '~' .. id), call('ZSCORE', holds, id)
  last = last and tonumber(last) - LATE or 0
  if held or before > now + 1 or before <= now - LATE or last >= before then return -now - 1 end
  call('ZADD', holds, string.format('%.0f', now + LATE), '~' .. id)
end
local is_new = call('HSETNX', KEYS[2], id, struct.pack('>I2I8', 0, now + 1) .. ARGV[3]) == 1
if is_new then
  local pushed = redis.pcall('RPUSH', KEYS[3], id)
  if type(pushed) == 'table' then
    -- `ready` has another type. A message that is stored in no state would never run.
    call('HDEL', KEYS[2], id)
    return pushed
  end
  if call('LLEN', KEYS[4]) == 0 then call('RPUSH', KEYS[4], '1') end
end
local kept = call('SET', KEYS[6], ARGV[1], 'PX', '3600000', 'GET')
local answer = before and now + 1 or 0
if not kept then return answer end
if (tonumber(kept) or tonumber(cmsgpack.unpack(kept)[1])) >= tonumber(ARGV[1]) then
  -- The network has delivered this attempt late: its repetition was stored, and perhaps leased and acked.
  call('SET', KEYS[6], kept, 'PX', '3600000')
  if is_new then
    call('LTRIM', KEYS[3], 0, -2)
    call('HDEL', KEYS[2], id)
  end
end
return answer
