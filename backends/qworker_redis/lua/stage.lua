-- Stage rows in their order: they are not leased from there. Rows of an earlier attempt of the same call are not added
-- twice.
-- KEYS: run staged
-- ARGV: how many rows are there already, ms until rows expire that are not sealed, this list's name, then rows:
--   the length of what is special about the message (2 bytes), that, and the rest, as `publish` takes them
-- RETURNS: how many rows are there now; -1: others than expected, because they have expired
local run, staged = unpack(KEYS)
local before, life, name = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local have = call('LLEN', staged)
local rows = {unpack(ARGV, 4)}
if have == before then
  spread('RPUSH', staged, rows)
elseif have ~= before + #rows then
  return -1
end
call('PEXPIRE', staged, life)
call('SADD', run, name)
call('PEXPIRE', run, life)
return before + #rows
