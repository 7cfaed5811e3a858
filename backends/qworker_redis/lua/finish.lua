-- Write the mark of a published step of a load, and remove its seal.
-- KEYS: jobs seals
-- ARGV: load, step, the mark
-- RETURNS: 1
local jobs, seals = unpack(KEYS)
local mark = call('HGET', jobs, ARGV[1])
-- A late step must not undo the mark of the next one.
if not mark or tonumber(cjson.decode(mark).step) < tonumber(ARGV[2]) then call('HSET', jobs, ARGV[1], ARGV[3]) end
call('HDEL', seals, ARGV[1] .. '/' .. ARGV[2])
return 1
