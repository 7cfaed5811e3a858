-- Keep a staged list from expiring: its seal is being made.
-- KEYS: staged
-- ARGV: how many rows it has to have
-- RETURNS: 1; 0 if it has others
if call('LLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
call('PERSIST', KEYS[1])
return 1
