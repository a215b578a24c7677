-- Deletes states of the key, and the refusals that their bans count, or the ban and its level.
-- From ARGV[FIRST] on each state has two arguments: its tag (first "ban", then "ban:level"), and
-- 1 if the state is logs. Returns how many fields and logs there were, without chunks that were cut off
-- before. After the reset of a state, leftovers of leases are not refunded.
--@ clock state log

local FIRST = 2
local names, logs = {}, {}
for i = FIRST, #ARGV, 2 do
  local tag, is_log = ARGV[i], ARGV[i + 1]
  names[#names + 1] = tag .. ':refused'
  if is_log == '1' then
    logs[#logs + 1] = tag
    logs[#logs + 1] = tag .. ':denied'
  else
    names[#names + 1] = tag
  end
end
-- A ban that has ended is none.
local ended = 0
for _, value in ipairs(ARGV[FIRST] == 'ban' and redis.call('HMGET', hash, 'ban', 'ban:level') or {}) do
  if value and tonumber(string.match(value, '^%d+') or now + 1) <= now then
    ended = ended + 1
  end
end
-- First the writes that need no memory, so that they succeed in a full Redis.
local found = redis.call('HDEL', hash, unpack(names))
if #logs > 0 then
  expiry = redis.call('HMGET', hash, 'expiry')[1]
  for i, value in ipairs(redis.call('HMGET', hash, unpack(logs))) do
    -- As if all entries were free.
    local log = open_log(logs[i], value, math.huge)
    found = found + (log.changed and 1 or 0)
    save_log(log, 0)
  end
  write()
end
if found > 0 and ARGV[FIRST] ~= 'ban' then
  redis.call('HDEL', hash, 'lease')
end
local born = ARGV[FIRST] ~= 'ban' and string.match(redis.call('HMGET', hash, 'born')[1] or '', '^%d+')
if born then
  -- See life.lua. A life must not end while a charge may be refunded in it, so this number lasts
  -- as long as any state.
  for i = FIRST, #ARGV, 2 do
    redis.call('HSET', hash, 'reset:' .. ARGV[i], pair_text(real, now + 315576000000000))
  end
  redis.call('HSET', hash, 'born', born .. ' r')
end
local function end_deletion()
  --@ after_deletion
end
end_deletion()
return found - ended
