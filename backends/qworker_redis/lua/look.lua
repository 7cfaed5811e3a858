-- Look at messages: those of a state, or some by their ids.
-- KEYS: meta msg ready sorted delayed leased claims errors fail done gone
-- ARGV: state (ready, delayed, leased, done, fail) then offset and limit; or id, then ids
-- RETURNS: [] if there is no queue; or [1, then for each message: id, value, state, time us, claim, error]
local meta, msg, ready, sorted, delayed, leased, claims, errors, fail, done, gone = unpack(KEYS)
local head = call('HMGET', meta, 'version', 'gone')
if not head[1] then return {} end
if head[1] ~= '1' then return too_new(head[1]) end
local removed = tonumber(head[2] or 0)
while take_due(msg, sorted, delayed, clock(), 1000) == 1000 do end

local answer = {1}
local sets = {leased = leased, delayed = delayed, fail = fail, done = done}

local function tell_of(id, value, state, time)
  insert(answer, id)
  insert(answer, value)
  insert(answer, state)
  insert(answer, time or '0')
  insert(answer, call('HGET', claims, id) or '')
  insert(answer, call('HGET', errors, id) or '')
end

local function one(id)
  local value = call('HGET', msg, id)
  if not value then return end
  for state, set in pairs(sets) do
    local time = call('ZSCORE', set, id)
    if time then return tell_of(id, value, state, time) end
  end
  tell_of(id, value, 'ready')
end

local function plain_rows(offset, limit)
  local ids = call('LRANGE', ready, offset, offset + limit - 1)
  local values = read(msg, ids)
  for i, id in ipairs(ids) do
    if values[i] then tell_of(id, values[i], 'ready') end
  end
end

local function ready_rows(offset, limit)
  if removed == 0 and call('ZCARD', sorted) == 0 then return plain_rows(offset, limit) end
  -- Two orders are merged, from their beginning.
  local rows = first_ready(msg, ready, sorted, gone, removed, offset + limit)
  for i = offset + 1, #rows.ids do tell_of(rows.ids[i], rows.values[i], 'ready') end
end

local function timed_rows(state, offset, limit)
  local rows = call('ZRANGE', sets[state], offset, offset + limit - 1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    local value = call('HGET', msg, rows[i])
    if value then tell_of(rows[i], value, state, rows[i + 1]) end
  end
end

if ARGV[1] == 'id' then
  for i = 2, #ARGV do one(ARGV[i]) end
elseif ARGV[1] == 'ready' then
  ready_rows(tonumber(ARGV[2]), tonumber(ARGV[3]))
else
  timed_rows(ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
end
return answer
