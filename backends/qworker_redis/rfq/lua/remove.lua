-- Delete messages in any state, also leased ones: by their ids, those of a state or of one of rfq's lists, or failed
-- ones that are unchanged.
-- KEYS: meta backlog nextlog message leased claims delayed tries errors enqueued origins failed
-- ARGV: ids, then ids; or a state (ready, delayed, leased, done, fail) and how many; or backlog or nextlog, and how
--   many; or unchanged, then id and time of the failure in us of each
-- RETURNS: messages deleted; their ids for backlog and nextlog; -1 if there is no such topic; -2 if only ids of messages
--   that are gone were deleted
local meta, backlog, nextlog, message, leased, claims, delayed, tries, errors, enqueued, origins, failed = unpack(KEYS)
local version = call('HGET', meta, 'version')
if version and version ~= '1' then return too_new(version) end
if not is_topic(version, backlog, nextlog) then return -1 end

check_types({leased, delayed, failed}, {claims, tries, errors, enqueued, origins}, {backlog, nextlog})

local function drop(ids)
  spread('ZREM', leased, ids)
  spread('HDEL', claims, ids)
  return forget(message, tries, errors, enqueued, origins, ids)
end

local function take_out(id)
  if call('ZREM', delayed, id) == 1 or call('ZREM', failed, id) == 1 then return end
  if call('LREM', nextlog, 1, id) == 0 then call('LREM', backlog, 1, id) end
end

local function of_list(list, limit)
  local ids = limit > 0 and call('RPOP', list, limit) or {}
  return ids, drop(ids)
end

local function of_set(set, limit)
  local ids = call('ZRANGE', set, 0, limit - 1)
  spread('ZREM', set, ids)
  local count = drop(ids)
  return count == 0 and #ids > 0 and -2 or count
end

call('ZREM', leased, '')
local what, limit = ARGV[1], tonumber(ARGV[2])
if what == 'ids' then
  local ids = {}
  for i = 2, #ARGV do
    -- The hash comes last: a message that is in no list any more cannot be found by a search.
    if call('EXISTS', message .. ':' .. ARGV[i]) == 1 then
      take_out(ARGV[i])
      insert(ids, ARGV[i])
    end
  end
  return drop(ids)
end
if what == 'unchanged' then
  local ids = as_found(failed, 2)
  spread('ZREM', failed, ids)
  return drop(ids)
end
take_due(backlog, message, delayed, clock(), 1000)
if what == 'backlog' or what == 'nextlog' then return (of_list(what == 'backlog' and backlog or nextlog, limit)) end
if what == 'ready' or what == 'leased' then
  local taken, count = of_list(what == 'ready' and backlog or nextlog, limit)
  return count == 0 and #taken > 0 and -2 or count
end
if what == 'delayed' or what == 'fail' then return of_set(what == 'fail' and failed or delayed, limit) end
return 0
