-- throttle: the script for one limit without a ban.
--
-- "tag" is the limit's tag, "cost" the cost of the quota, and "room" the longest
-- backlog that leaves room for it, in microseconds. "cost_ns" and "room_ns" are the
-- nanoseconds of the two. All but the first two may be absent. Returns the backlog
-- before the action in nanoseconds, negative if the action is refused, and as text if
-- it is too long for a number. Under a ban, returns the rest of the ban in
-- microseconds, the backlog, and the limit that set it (see expiry.lua), if it is known.

local state = call('HMGET', hash, tag, 'ban', 'expiry')
local value, ban, expiry = state[1], state[2], state[3]
--@ backlog

--@ ban
if left > 0 then
  return {string.format('%.0f', left), string.format('%.0f%03.0f', us, ns), by}
end

local sign, before_us, before_ns = 1, us, ns
local room_us = (room or 0) + 0
if us > room_us or us == room_us and ns > (room_ns or 0) + 0 then
  sign = -1
else
  local cost_us, cost_ns = cost + 0, (cost_ns or 0) + 0
  --@ charge
  local needed = us
  --@ expiry
  if before_us > 0 and cost_ns == 0 and not expires and now >= 100000000 then
    -- The TAT has not passed. Redis adds to it faster than Lua makes its text. In the
    -- first 100 seconds of 1970, which only tests set, the text begins with a 0, which
    -- HINCRBY rejects.
    call('HINCRBY', hash, tag, cost .. '000')
  else
    --@ tat
    local text = tat
    --@ keep
  end
end

if before_us < 9000000000000 then
  return sign * (before_us * 1000 + before_ns)
end
return string.format('%.0f%03.0f', sign * before_us, before_ns)
