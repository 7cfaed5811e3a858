-- Stage rows in their order. They are not leased from there. Rows of an earlier attempt of the same call are not added
-- twice.
-- KEYS: run staged
-- ARGV: the number of rows in the list so far, ms until unsealed rows expire, this list's name, then rows:
--   the length of `special` (2 bytes), `special` and `rest`, as `publish` takes them
-- RETURNS: the number of rows now; -1: another number than expected, because rows have expired
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
