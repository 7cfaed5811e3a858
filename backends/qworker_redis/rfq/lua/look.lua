-- Read messages: those of a state in its order, or some by their ids.
-- KEYS: meta backlog nextlog message leased claims delayed tries errors enqueued origins failed
-- ARGV: id, then ids; or a state (ready, delayed, leased, done, fail), how many, 1 if the last come first, and where to
--   continue: the place and the id of a message that was seen
-- RETURNS: [] if there is no such topic; or [1, then for each message: id, value, state, place, claim, error]; for a
--   state, a place and an id in place of the 1, if there may be more; for ids, [how many ids were read], if the bodies of
--   all are too large for one answer
--   place: the time us that orders its state, 0 for messages of other consumers; of a ready one of a state, how
--     many are before it
local meta, backlog, nextlog, message, leased, claims, delayed, tries, errors, enqueued, origins, failed = unpack(KEYS)
local version = call('HGET', meta, 'version')
if version and version ~= '1' then return too_new(version) end
if not is_topic(version, backlog, nextlog) then return {} end
while take_due(backlog, message, delayed, clock(), 1000) == 1000 do end
local answer = {1}
-- The bytes of the values in the answer, and how many are enough.
local size, MOST_BYTES = 0, 8388608

local function tell_of(id, state, place)
  local fields = fields_of(message, id)
  if #fields == 0 then return end
  size = size + size_of(fields)
  local value = values_of(tries, enqueued, origins, {id}, {fields})[1]
  local claim, error = call('HGET', claims, id) or '', call('HGET', errors, id) or ''
  for _, part in ipairs({id, value, state, place or '0', claim, error}) do
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

-- Return the present place of a message in line, or nil if it is not in line any more.
local function place_of(number, id)
  if call('LINDEX', backlog, -number - 1) == id then return number end
  local from_head = call('LPOS', backlog, id, 'RANK', -1)
  return from_head and call('LLEN', backlog) - 1 - from_head
end

local function ready_rows(limit, newest, number, id)
  local size = call('LLEN', backlog)
  -- A message that is not in line any more was next when it left, as far as can be known.
  local seen = number and (place_of(number, id) or -1)
  local first = newest and math.max(0, (seen or size) - limit) or (seen or -1) + 1
  local last = newest and (seen or size) - 1 or first + limit - 1
  if last < first then return end
  local ids = call('LRANGE', backlog, -last - 1, -first - 1)
  for i = 1, #ids do
    -- The next one in line is the last of the list.
    local at = newest and i or #ids - i + 1
    tell_of(ids[at], 'ready', math.min(last, size - 1) - at + 1)
  end
  if newest and first > 0 then
    answer[1] = {first, ids[#ids]}
  elseif not newest and last < size - 1 then
    answer[1] = {last, ids[1]}
  end
end

-- Leased messages of qworker by their expiry, and then those of other consumers, which have no time; in the order of
-- the page.
local function all_leased(newest)
  local rows, ours = {}, {}
  local timed = call('ZRANGE', leased, 0, -1, 'WITHSCORES')
  for i = 1, #timed, 2 do
    ours[timed[i]] = true
    insert(rows, {timed[i], timed[i + 1]})
  end
  local worked = call('LRANGE', nextlog, 0, -1)
  for i = #worked, 1, -1 do
    if not ours[worked[i]] then insert(rows, {worked[i], '0'}) end
  end
  if newest then
    for i = 1, math.floor(#rows / 2) do rows[i], rows[#rows - i + 1] = rows[#rows - i + 1], rows[i] end
  end
  return rows
end

-- Return the row after the last seen one, or after those that were before it when it was seen.
local function row_behind(rows, newest, time, id)
  local behind = 0
  for i, row in ipairs(rows) do
    if row[1] == id then return i + 1 end
    if time ~= '0' then
      local before = row[2] ~= '0' and tonumber(row[2]) < tonumber(time)
      if newest then before = row[2] == '0' or tonumber(row[2]) > tonumber(time) end
      if before then behind = i end
    elseif not newest and row[2] ~= '0' then
      behind = i
    end
  end
  return behind + 1
end

local function leased_rows(limit, newest, time, id)
  local rows = all_leased(newest)
  local first = id and row_behind(rows, newest, time, id) or 1
  local last = math.min(first + limit - 1, #rows)
  for i = first, last do tell_of(rows[i][1], 'leased', rows[i][2]) end
  if first <= last and last < #rows then answer[1] = {rows[last][2], rows[last][1]} end
end

local function timed_rows(set, state, limit, newest, time, id)
  local rows, is_last = timed_page(set, limit, newest, time, id)
  for i = 1, #rows, 2 do tell_of(rows[i], state, rows[i + 1]) end
  if not is_last then answer[1] = {rows[#rows], rows[#rows - 1]} end
end

local limit, newest = tonumber(ARGV[2]), ARGV[3] == '1'
if ARGV[1] == 'id' then
  for i = 2, #ARGV do
    one(ARGV[i])
    if size > MOST_BYTES and i < #ARGV then
      answer[1] = {i - 1}
      break
    end
  end
elseif ARGV[1] == 'ready' then
  ready_rows(limit, newest, tonumber(ARGV[4]), ARGV[5])
elseif ARGV[1] == 'leased' then
  leased_rows(limit, newest, ARGV[4], ARGV[5])
elseif ARGV[1] ~= 'done' then
  timed_rows(ARGV[1] == 'fail' and failed or delayed, ARGV[1], limit, newest, ARGV[4], ARGV[5])
end
return answer
