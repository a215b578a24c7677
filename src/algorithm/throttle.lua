-- throttle: the script for one limit without a ban. If the cost is 0, it only
-- looks.
--
-- ARGV[2] is the limit's tag. ARGV[3] and ARGV[4] are the cost of the quota;
-- ARGV[5] and ARGV[6] are the longest backlog that leaves room for it; each in
-- microseconds and nanoseconds. Returns the backlog before the action in
-- nanoseconds, negative if the action is refused, and as text if it is too long
-- for a number. Under a ban, returns two numbers: the rest of the ban in
-- microseconds, and the backlog.

local tag = ARGV[2]
local state = call('HMGET', hash, tag, 'ban', 'expiry')
local value, ban, expiry = state[1], state[2], state[3]
--@ backlog

if ban then
  ban = tonumber(ban) - now
  if ban > 0 then
    return {string.format('%.0f', ban), string.format('%.0f%03.0f', us, ns)}
  end
end

local sign, before_us, before_ns = 1, us, ns
local room_us = ARGV[5] + 0
if us > room_us or us == room_us and ns > ARGV[6] + 0 then
  sign = -1
else
  local cost_us, cost_ns = ARGV[3] + 0, ARGV[4] + 0
  if cost_us > 0 or cost_ns > 0 then
    --@ charge
    --@ tat
    local text, needed = tat, us
    --@ expiry
    --@ keep
  end
end

if before_us < 9000000000000 then
  return sign * (before_us * 1000 + before_ns)
end
return string.format('%.0f%03.0f', sign * before_us, before_ns)
