-- Forgets of the key the limits whose tags come from ARGV[2] on. Returns how
-- many things that were; chunks that were cut off before do not count.

local names, logs = {}, {}
for i = 2, #ARGV do
  names[#names + 1] = ARGV[i] .. ':refused'
  if string.find(ARGV[i], '^sliding_log:') then
    logs[#logs + 1] = ARGV[i]
    logs[#logs + 1] = ARGV[i] .. ':denied'
  else
    names[#names + 1] = ARGV[i]
  end
end
-- First what needs no memory, so that a full Redis refuses nothing.
local found = redis.call('HDEL', hash, unpack(names))
if #logs > 0 then
  for i, value in ipairs(redis.call('HMGET', hash, unpack(logs))) do
    -- As if all of it were free.
    local log = open_log(logs[i], value, math.huge)
    found = found + (log.changed and 1 or 0)
    save_log(log, 0)
  end
  write()
end
return found
