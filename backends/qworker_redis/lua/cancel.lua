-- Move messages to failed, also leased ones. Finished ones are reported only.
-- KEYS: meta msg ready sorted delayed leased claims keys errors fail done gone cells
-- ARGV: what is kept as the error, the state in which a message must be ('' any), then for each message: its id, the
--   member of a cell ('' none), and the version that this cell must have
-- RETURNS: [] if there is no queue; or [1, then for each message: id, its state before, a token that no lease of it
--   exceeds, 1 if it was cancelled before]
local meta, msg, ready, sorted, delayed, leased, claims, keys, errors, fail, done, gone, cells = unpack(KEYS)
local head = call('HMGET', meta, 'version', 'gone', 'fence')
if not head[1] then return {} end
if head[1] ~= '1' then return too_new(head[1]) end
check_types({sorted, delayed, leased, fail, done}, {msg, claims, keys, errors, gone, cells}, {ready})
local removed, now = tonumber(head[2] or 0), clock()
local waiting, before = {leased = leased, delayed = delayed}, removed
local answer = {1}

local function tell_of(id, state, already)
  insert(answer, id)
  insert(answer, state)
  insert(answer, head[3] or '0')
  insert(answer, already)
end

-- Return whether a message that has not finished is in the selected state.
local function is_selected(id)
  if ARGV[2] == '' then return true end
  if call('ZSCORE', leased, id) then return ARGV[2] == 'leased' end
  local due = call('ZSCORE', delayed, id)
  return ARGV[2] == (due and tonumber(due) > now and 'delayed' or 'ready')
end

local function is_unchanged(member, version)
  if member == '' then return true end
  local cell = read_cell(cells, member, now)
  return cell and cell.version == version
end

local function cancel(id, value)
  local state, left = take_out(waiting, sorted, claims, gone, id, value)
  removed = removed + left
  call('HSET', errors, id, ARGV[1])
  call('ZADD', fail, text(now), id)
  free_key(keys, id, value)
  tell_of(id, state, 0)
end

-- The first write needs no memory: before Redis 7 a full store lets a script continue that has begun to write.
call('ZREM', leased, '')
take_due(msg, sorted, delayed, now, 1000)
for i = 3, #ARGV, 3 do
  local id = ARGV[i]
  local value = call('HGET', msg, id)
  if value then
    if call('ZSCORE', fail, id) then
      if ARGV[2] == '' then tell_of(id, 'fail', is_cancelled(errors, id) and 1 or 0) end
    elseif call('ZSCORE', done, id) then
      if ARGV[2] == '' then tell_of(id, 'done', 0) end
    elseif is_selected(id) and is_unchanged(ARGV[i + 1], ARGV[i + 2]) then
      cancel(id, value)
    end
  end
end
if removed > before then call('HINCRBY', meta, 'gone', removed - before) end
-- So `lease` never has to pass over many: each call takes more rows off than it leaves.
tidy_ready(meta, msg, ready, sorted, gone, removed)
return answer
