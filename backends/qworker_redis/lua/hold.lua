-- Keep a staged list from expiring, because its seal is being made.
-- KEYS: staged
-- ARGV: the number of rows that it must have
-- RETURNS: 1; 0 if it has another number of rows
if call('LLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
call('PERSIST', KEYS[1])
return 1
