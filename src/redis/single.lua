-- The script for one limit without options: the common call. It makes no function and only the
-- tables of replies.

-- Each argument costs time. So ARGV begins with the limit's arguments, without zeros at
-- the end. If a test sets the time, it is ARGV[6], and zeros fill the places before it.
--< single_clock() -> hash, call, real, now, least
local hash, call, given = KEYS[1], redis.call, ARGV[6]
--@ time
-->

-- Of an algorithm that counts units, whose file has the parts. ARGV: the limit's tag, the quota,
-- the period, the numbers for the algorithm. Returns the quota in use after the action, and the
-- wait until nothing is in use. If the action is refused, the wait until the same call can
-- succeed follows, and under a ban also its rest, and the limit that set it, if it is known.
-- Waits are in microseconds.
local tag, quota, period = ARGV[1], ARGV[2] + 0, ARGV[3] + 0
local first, second = ARGV[4], ARGV[5]
--@ numbers
local state = call('HMGET', hash, tag, 'ban', 'expiry')
local value, ban, expiry = state[1], state[2], state[3]

--< single_take
--@ load

--@ ban
local allowed = left <= 0 and used + quota <= capacity
if allowed then
  --@ take
  --@ text
  local needed, lives = used
  --@ reset
  --@ lives
  needed = lives
  --@ expiry
  --@ keep
  return {used, free}
end

local reset, wait, lacking = 0, 0, used + quota - capacity
if used > 0 then
  local needed = used
  --@ reset
  reset = free
end
if lacking > 0 and quota <= capacity then
  local needed = lacking
  --@ wait
  wait = free
end
if left > 0 then
  return {used, reset, wait, left, by}
end
return {used, reset, wait}
-->
