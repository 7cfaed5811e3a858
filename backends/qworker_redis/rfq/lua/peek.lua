-- Return when there may be a message to lease, for a client that is about to wait.
-- KEYS: meta backlog delayed
-- ARGV: none that is used
-- RETURNS: us until there is something to lease: 0 now, -1 not known, -2 paused
local meta, backlog, delayed = unpack(KEYS)
if call('HEXISTS', meta, 'down') == 1 then return -2 end
if call('LLEN', backlog) > 0 then return 0 end
return until_due(delayed, clock())
