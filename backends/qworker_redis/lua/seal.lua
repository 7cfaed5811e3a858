-- Record permanently which staged lists are a step of a load. A seal is made in two steps: it is void until all its
-- lists are held.
-- KEYS: jobs seals
-- ARGV: load, step, and: '' to read, or the seal to make ('s' sealed, 'h' still to be held, then the manifest), or '!'
--   and the void seal to remove, or '=' and the seal that is held now
-- RETURNS: [the mark of the load or '', the seal of the step or '']
local jobs, seals = unpack(KEYS)
local job, step, wanted = ARGV[1], ARGV[2], ARGV[3]
local field = job .. '/' .. step
local mark = call('HGET', jobs, job)
if mark and tonumber(cjson.decode(mark).step) >= tonumber(step) then
  call('HDEL', seals, field)
  return {mark, ''}
end
local seal = call('HGET', seals, field)
local kind = string.sub(wanted, 1, 1)
if kind == 'h' and not seal then
  seal = wanted
  call('HSET', seals, field, seal)
elseif kind == '!' and seal == 'h' .. string.sub(wanted, 2) then
  call('HDEL', seals, field)
  seal = false
elseif kind == '=' and seal == 'h' .. string.sub(wanted, 2) then
  seal = 's' .. string.sub(wanted, 2)
  call('HSET', seals, field, seal)
end
return {mark or '', seal or ''}
