-- Look at messages: those of a state, or some by their ids.
-- KEYS: meta backlog nextlog message leased claims delayed tries errors enqueued origins failed
-- ARGV: state (ready, delayed, leased, done, fail) then offset and limit; or id, then ids
-- RETURNS: [] if there is no such topic; or [1, then for each message: id, value, state, time us, claim, error]
local meta, backlog, nextlog, message, leased, claims, delayed, tries, errors, enqueued, origins, failed = unpack(KEYS)
local version = call('HGET', meta, 'version')
if version and version ~= '1' then return too_new(version) end
if not is_topic(version, backlog, nextlog) then return {} end
while take_due(backlog, message, delayed, clock(), 1000) == 1000 do end
local answer = {1}

local function tell_of(id, state, time)
  local fields = fields_of(message, id)
  if #fields == 0 then return end
  local value = values_of(tries, enqueued, origins, {id}, {fields})[1]
  for _, part in ipairs({id, value, state, time or '0', call('HGET', claims, id) or '', call('HGET', errors, id) or ''}) do
    insert(answer, part)
  end
end

local function one(id)
  for state, set in pairs({delayed = delayed, fail = failed}) do
    local time = call('ZSCORE', set, id)
    if time then return tell_of(id, state, time) end
  end
  if call('LPOS', nextlog, id) then return tell_of(id, 'leased', call('ZSCORE', leased, id)) end
  if call('LPOS', backlog, id) then return tell_of(id, 'ready') end
end

local function ready_rows(offset, limit)
  if limit == 0 then return end
  local ids = call('LRANGE', backlog, -offset - limit, -offset - 1)
  for i = #ids, 1, -1 do tell_of(ids[i], 'ready') end
end

-- Ours by their expiry, and then those of other consumers, who tell no time.
local function leased_rows(offset, limit)
  local rows, ours = {}, {}
  local timed = call('ZRANGE', leased, 0, -1, 'WITHSCORES')
  for i = 1, #timed, 2 do
    ours[timed[i]] = true
    insert(rows, {timed[i], timed[i + 1]})
  end
  local worked = call('LRANGE', nextlog, 0, -1)
  for i = #worked, 1, -1 do
    if not ours[worked[i]] then insert(rows, {worked[i]}) end
  end
  for i = offset + 1, math.min(offset + limit, #rows) do tell_of(rows[i][1], 'leased', rows[i][2]) end
end

local function timed_rows(set, state, offset, limit)
  if limit == 0 then return end
  local rows = call('ZRANGE', set, offset, offset + limit - 1, 'WITHSCORES')
  for i = 1, #rows, 2 do tell_of(rows[i], state, rows[i + 1]) end
end

if ARGV[1] == 'id' then
  for i = 2, #ARGV do one(ARGV[i]) end
elseif ARGV[1] == 'ready' then
  ready_rows(tonumber(ARGV[2]), tonumber(ARGV[3]))
elseif ARGV[1] == 'leased' then
  leased_rows(tonumber(ARGV[2]), tonumber(ARGV[3]))
elseif ARGV[1] ~= 'done' then
  timed_rows(ARGV[1] == 'fail' and failed or delayed, ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
end
return answer
