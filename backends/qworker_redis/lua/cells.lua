-- Carry out operations on the cells of a queue, in their order.
-- KEYS: meta leased claims cells celldue cellnames
-- ARGV: the beginning of the channels of cells, PUBLISH or SPUBLISH, then for each operation: its name (get, version,
--   put, delete, list, groups or close), the member of the cell (for list: of the one before the page; for groups: the
--   group before the page; for close: the group), its condition ('' none; = and a version, or = alone for an absent
--   cell), and for a put only: the new version, us until it expires ('' never), rank, value. `list` and `groups` have
--   the most rows, and `list` the group, in the places of the first two.
-- RETURNS: [1 if the queue is new, then for each operation [1 if it was done, 1 if there is nothing more, rows...]]; a
--   row is [member or group, version, us until it expires ('' never), rank, value]
local meta, leased, claims, cells, celldue, cellnames = unpack(KEYS)
local state = call('HGET', meta, 'version')
if state and state ~= '1' then return too_new(state) end
check_types({celldue, cellnames}, {cells}, {})
local now = clock()
local answer = {0}
local has_written = false

-- Before Redis 7 a full store lets a script continue that has begun to write. This write needs no memory.
local function begin_writing()
  if not has_written then call('ZREM', celldue, '') end
  has_written = true
end

local function row(member, cell)
  local left = cell.due ~= '-' and text(cell.due - now) or ''
  return {member, cell.version, left, cell.rank, string.sub(cell.stored, cell.at)}
end

-- Clients that wait subscribe to it. It is a hint: a user without permission for it only delays them.
local function notify(member)
  redis.pcall(ARGV[2], ARGV[1] .. member, '')
end

local function is_refused(cell, only)
  return only ~= '' and string.sub(only, 2) ~= (cell and cell.version or '')
end

local function remove(members)
  begin_writing()
  spread('HDEL', cells, members)
  spread('ZREM', celldue, members)
  spread('ZREM', cellnames, members)
end

-- Compare two integers given as texts. Lua's numbers are not exact from 2^53 on.
local function is_below(one, other)
  local number = tonumber(one)
  if number ~= tonumber(other) then return number < tonumber(other) end
  local shorter = #one < #other or (#one == #other and one < other)
  return one ~= other and (number >= 0) == shorter
end

local function put(member, only, version, ttl, rank, value)
  local cell = read_cell(cells, member, now)
  -- The answer to an earlier attempt of this call was lost.
  if cell and cell.version == version then return {1, 0} end
  if is_refused(cell, only) or cell and is_below(rank, cell.rank) then
    return {0, 0, cell and row(member, cell) or nil}
  end
  begin_writing()
  if not state then
    make_queue(meta, leased, claims)
    state, answer[1] = '1', 1
  end
  local due = '-'
  if ttl == '' then
    call('ZREM', celldue, member)
  else
    due = text(now + tonumber(ttl))
    call('ZADD', celldue, due, member)
  end
  call('ZADD', cellnames, 0, member)
  call('HSET', cells, member, version .. ' ' .. due .. ' ' .. rank .. '\n' .. value)
  notify(member)
  return {1, 0}
end

local function delete(member, only)
  local cell = read_cell(cells, member, now)
  if not cell or is_refused(cell, only) then return {0, 0, cell and row(member, cell) or nil} end
  remove({member})
  notify(member)
  return {1, 0}
end

-- Return the first cell of a group that has not expired. Those before it are removed if a close asks for it.
local function first_live(group, removes)
  local start = '[' .. group .. '\0'
  while true do
    local members = call('ZRANGEBYLEX', cellnames, start, '(' .. group .. '\1', 'LIMIT', 0, 100)
    local expired = {}
    for _, member in ipairs(members) do
      local cell = read_cell(cells, member, now)
      if cell then return cell end
      insert(expired, member)
    end
    if removes and #expired > 0 then remove(expired) end
    if #members < 100 then return nil end
    start = '(' .. members[#members]
  end
end

local function list(after, group, most)
  local found, size = {1, 1}, 0
  local start = '(' .. after
  while true do
    local members = call('ZRANGEBYLEX', cellnames, start, '(' .. group .. '\1', 'LIMIT', 0, most + 1)
    for _, member in ipairs(members) do
      local cell = read_cell(cells, member, now)
      if cell then
        size = size + #cell.stored
        if #found - 2 == most or #found > 2 and size > 1048576 then
          found[2] = 0
          return found
        end
        insert(found, row(member, cell))
      end
    end
    if #members <= most then return found end
    start = '(' .. members[#members]
  end
end

local function groups(after, most)
  local found = {1, 1}
  local start = after == '' and '-' or '[' .. after .. '\1'
  while true do
    local member = call('ZRANGEBYLEX', cellnames, start, '+', 'LIMIT', 0, 1)[1]
    if not member then return found end
    local group = string.match(member, '^([^%z]*)')
    if first_live(group, false) then
      if #found - 2 == most then
        found[2] = 0
        return found
      end
      insert(found, {group, '', '', '0', ''})
    end
    start = '[' .. group .. '\1'
  end
end

local i = 3
while i <= #ARGV do
  local name, member, only = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  i = i + 3
  if name == 'put' then
    insert(answer, put(member, only, ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]))
    i = i + 4
  elseif name == 'delete' then
    insert(answer, delete(member, only))
  elseif name == 'list' then
    insert(answer, list(member, only, tonumber(ARGV[i])))
    i = i + 1
  elseif name == 'groups' then
    insert(answer, groups(member, tonumber(only)))
  elseif name == 'close' then
    local is_empty = first_live(member, true) and 0 or 1
    insert(answer, {is_empty, is_empty})
  else
    local cell = read_cell(cells, member, now)
    if cell and name == 'version' then
      insert(answer, {1, 0, {member, cell.version, '', '0', ''}})
    else
      insert(answer, {cell and 1 or 0, 0, cell and row(member, cell) or nil})
    end
  end
end
return answer
