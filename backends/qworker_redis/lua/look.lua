-- Read messages: those of a state in its order, or some by their ids.
-- KEYS: meta msg ready sorted delayed leased claims errors fail done gone
-- ARGV: id, then ids; or a state (ready, delayed, leased, done, fail), how many, 1 if the last come first, and where to
--   continue: the time us and the id of a message that was seen;
--   of a ready one: kind, number and id of a row of `ready`, and a member of `sorted`, each '' if there is none:
--     kind l: it is that row, and the member comes before it; s: it is that member, and the row comes before it;
--     e: both were seen last. A number is where the row was: rows have moved towards the front since.
-- RETURNS: [] if there is no queue; or [1, then for each message: id, value, state, place, claim, error]; for a state,
--   where to continue in place of the 1, if there may be more; for ids, [how many ids were read], if the bodies of all
--   are too large for one answer
--   place: the time us that orders its state; of a ready one of a state, where it is, separated by ~
local meta, msg, ready, sorted, delayed, leased, claims, errors, fail, done, gone = unpack(KEYS)
local head = call('HMGET', meta, 'version', 'gone')
if not head[1] then return {} end
if head[1] ~= '1' then return too_new(head[1]) end
local removed = tonumber(head[2] or 0)
while take_due(msg, sorted, delayed, clock(), 1000) == 1000 do end

-- The rows in which another row is searched before the whole list is. At most this many are taken from its front
-- between two pages.
local NEAR = 1000
local answer = {1}
-- The bytes of the values in the answer, and how many are enough.
local size, MOST_BYTES = 0, 8388608
local sets = {leased = leased, delayed = delayed, fail = fail, done = done}

local function tell_of(id, value, state, place)
  insert(answer, id)
  insert(answer, value)
  size = size + #value
  insert(answer, state)
  insert(answer, place or '0')
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

-- Return the present number of a row, or -1 if it was taken, and all rows before it with it.
local function row_of(number, id)
  if call('LINDEX', ready, number) == id then return number end
  local first = math.max(0, number - NEAR)
  local rows = number > 0 and call('LRANGE', ready, first, number - 1) or {}
  for i = #rows, 1, -1 do
    if rows[i] == id then return first + i - 1 end
  end
  return first > 0 and call('LPOS', ready, id, 'MAXLEN', first) or -1
end

-- Return whether a row still names a message that was removed and stored again: the first rows of an id are those.
local function is_stale(id, number)
  local count = removed > 0 and tonumber(call('HGET', gone, id) or 0) or 0
  return count > 0 and #call('LPOS', ready, id, 'COUNT', 0, 'MAXLEN', number + 1) <= count
end

-- Return up to `limit` rows of the list, as {number, id, value}, in the order of the page; and whether they are the
-- last.
local function list_page(limit, newest, kind, number, id)
  local size = call('LLEN', ready)
  local seen = number and row_of(number, id)
  local first, last
  if newest then
    -- A row before the last seen one is still to come.
    last = kind == 's' and (seen or -1) or (seen or size) - 1
    first = math.max(0, last - limit + 1)
  else
    first = seen and seen + 1 or 0
    last = first + limit - 1
  end
  if last < first then return {}, true end
  local ids, rows = call('LRANGE', ready, first, last), {}
  local values = read(msg, ids)
  for i = 1, #ids do
    local at = newest and #ids - i + 1 or i
    rows[i] = {first + at - 1, ids[at], values[at]}
  end
  return rows, newest and first == 0 or not newest and last >= size - 1
end

local function sorted_page(limit, newest, kind, member)
  local members
  if not newest then
    members = call('ZRANGEBYLEX', sorted, member and '(' .. member or '-', '+', 'LIMIT', 0, limit)
  elseif kind == 'l' then
    members = member and call('ZREVRANGEBYLEX', sorted, '[' .. member, '-', 'LIMIT', 0, limit) or {}
  else
    members = call('ZREVRANGEBYLEX', sorted, member and '(' .. member or '+', '-', 'LIMIT', 0, limit)
  end
  local ids = {}
  for i, each in ipairs(members) do ids[i] = id_of(each) end
  return members, read(msg, ids), #members < limit
end

-- Two orders are merged, each from the place where it was left.
local function ready_rows(limit, newest, kind, number, id, member)
  local rows, rows_end = list_page(limit, newest, kind, number, id)
  local members, values, members_end = sorted_page(limit, newest, kind, member)
  local i, j, count = 1, 1, 0

  local function place_of(which)
    local at, name, each = number, id, member
    -- In reverse order, the rows before it come next.
    if newest and which == 'l' then each = members[j] end
    if newest and which == 's' then
      at, name = nil, nil
      if rows[i] then at, name = rows[i][1], rows[i][2] end
    end
    return which .. '~' .. (at or '') .. '~' .. (name or '') .. '~' .. (each or '')
  end

  while count < limit do
    local row, each = rows[i], members[j]
    if not row and not rows_end or not each and not members_end or not row and not each then break end
    local is_row = row and not each
    if row and not row[3] then
      is_row = true
    elseif row and each then
      is_row = (place(row[2], row[3]) < each) == not newest
    end
    if is_row then
      number, id = row[1], row[2]
      i = i + 1
      if kind == 's' then kind = 'e' end
      if row[3] and not is_stale(id, number) then
        tell_of(id, row[3], 'ready', place_of('l'))
        count = count + 1
      end
    else
      member = each
      j = j + 1
      if kind == 'l' then kind = 'e' end
      if values[j - 1] then
        tell_of(id_of(each), values[j - 1], 'ready', place_of('s'))
        count = count + 1
      end
    end
  end
  if rows[i] or not rows_end or members[j] or not members_end then
    answer[1] = {kind, number or '', id or '', member or ''}
  end
end

local function timed_rows(state, limit, newest, time, id)
  local rows, is_last = timed_page(sets[state], limit, newest, time, id)
  for i = 1, #rows, 2 do
    local value = call('HGET', msg, rows[i])
    if value then tell_of(rows[i], value, state, rows[i + 1]) end
  end
  if not is_last then answer[1] = {rows[#rows], rows[#rows - 1]} end
end

local function given(argument)
  return argument ~= '' and argument or nil
end

if ARGV[1] == 'id' then
  for i = 2, #ARGV do
    one(ARGV[i])
    if size > MOST_BYTES and i < #ARGV then
      answer[1] = {i - 1}
      break
    end
  end
else
  local limit, newest = tonumber(ARGV[2]), ARGV[3] == '1'
  if ARGV[1] == 'ready' then
    ready_rows(limit, newest, ARGV[4], tonumber(ARGV[5]), given(ARGV[6]), given(ARGV[7]))
  else
    timed_rows(ARGV[1], limit, newest, ARGV[4], ARGV[5])
  end
end
return answer
