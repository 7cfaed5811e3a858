-- Delete messages in any state, also leased ones: by their ids, or those of a state.
-- KEYS: meta msg ready sorted delayed leased claims keys errors fail done gone holds
-- ARGV: ids, then ids; or a state (ready, delayed, leased, done, fail) and how many
-- RETURNS: messages deleted; -1 if there is no queue; -2 if only rows of messages that are gone were deleted
local meta, msg, ready, sorted, delayed, leased, claims, keys, errors, fail, done, gone, holds = unpack(KEYS)
local state = call('HMGET', meta, 'version', 'gone')
if not state[1] then return -1 end
if state[1] ~= '1' then return too_new(state[1]) end
check_types({sorted, delayed, leased, fail, done, holds}, {msg, claims, keys, errors, gone}, {ready})
local removed = tonumber(state[2] or 0)
local sets = {leased = leased, delayed = delayed, fail = fail, done = done}

-- A message that has probably not been leased keeps no hold, as in a directory.
local function drop(id, value, state)
  if (state == 'ready' or state == 'delayed') and struct.unpack('>I2', value) == 0 then call('ZREM', holds, id) end
  free_key(keys, id, value)
  call('HDEL', msg, id)
  call('HDEL', errors, id)
end

local function by_ids()
  local count, before = 0, removed
  for i = 2, #ARGV do
    local value = call('HGET', msg, ARGV[i])
    if value then
      local state, left = take_out(sets, sorted, claims, gone, ARGV[i], value)
      removed = removed + left
      drop(ARGV[i], value, state)
      count = count + 1
    end
  end
  if removed > before then call('HINCRBY', meta, 'gone', removed - before) end
  -- So `lease` never has to pass over many: each call takes more rows off than it leaves.
  tidy_ready(meta, msg, ready, sorted, gone, removed)
  return count
end

local function drop_all(ids)
  local values, count = read(msg, ids), 0
  for i, id in ipairs(ids) do
    if values[i] then
      drop(id, values[i], ARGV[1])
      count = count + 1
    end
  end
  return count
end

local function ready_ones(limit)
  local first = first_ready(msg, ready, sorted, gone, removed, limit)
  spread('ZREM', sorted, first.members)
  take_rows(meta, ready, gone, first.heads, first.stale, first.rows)
  return drop_all(first.ids), #first.members + first.rows
end

local function timed_ones(set, limit)
  local ids = call('ZRANGE', set, 0, limit - 1)
  -- The anchor is the last member of the leased set.
  if ids[#ids] == ANCHOR then table.remove(ids) end
  spread('ZREM', set, ids)
  spread('HDEL', claims, ids)
  return drop_all(ids), #ids
end

call('ZREM', leased, '')
if ARGV[1] == 'ids' then return by_ids() end
take_due(msg, sorted, delayed, clock(), 1000)
local limit = tonumber(ARGV[2])
local count, taken
if ARGV[1] == 'ready' then
  count, taken = ready_ones(limit)
else
  count, taken = timed_ones(sets[ARGV[1]], limit)
end
return count == 0 and taken > 0 and -2 or count
