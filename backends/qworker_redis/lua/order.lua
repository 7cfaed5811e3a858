-- Where a page begins in the order of a state: `look` has this beside what all scripts share.

-- Byte by byte, as Redis orders members of one score: Lua's own comparison depends on the server's language.
local function precedes(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- How many members stand before a time and an id, which need not be there any more; and 1 if they are there.
local function rank_of(set, time, id)
  local score = call('ZSCORE', set, id)
  if score and tonumber(score) == tonumber(time) then return call('ZRANK', set, id), 1 end
  local low, high = call('ZCOUNT', set, '-inf', '(' .. time), call('ZCOUNT', set, '-inf', time)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if precedes(call('ZRANGE', set, middle, middle)[1], id) then low = middle + 1 else high = middle end
  end
  return low, 0
end

-- A page of a sorted set: members and scores in turns, and whether it is the last one.
local function timed_page(set, limit, newest, time, id)
  local size = call('ZCARD', set)
  local start, stop
  if newest then
    stop = (time and rank_of(set, time, id) or size) - 1
    start = math.max(0, stop - limit + 1)
  else
    start = 0
    if time then
      local rank, there = rank_of(set, time, id)
      start = rank + there
    end
    stop = start + limit - 1
  end
  if stop < start then return {}, true end
  local rows, out = call('ZRANGE', set, start, stop, 'WITHSCORES'), {}
  if newest then
    for i = #rows - 1, 1, -2 do
      insert(out, rows[i])
      insert(out, rows[i + 1])
    end
  else
    out = rows
  end
  return out, (newest and start or size - 1 - stop) <= 0
end
