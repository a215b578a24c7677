-- Charges the quota to one limit without options, of an algorithm that counts units: the script
-- for the common call. It makes no function and only the tables of replies. The parts are in
-- the algorithm's file.
--
-- ARGV: the limit's tag, the quota, the period, the numbers for the algorithm. Returns the
-- quota in use after the action, and the wait until nothing is in use. If the action is
-- refused, the wait until the same call can succeed follows, and under a ban also its rest, and
-- the limit that set it, if it is known. Waits are in microseconds.

--@ load

--@ ban
local allowed = left <= 0 and used + quota <= capacity
if allowed and quota > 0 then
  --@ take
  --@ text
  local needed = used
  --@ reset
  needed = free
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
if allowed then
  return {used, reset}
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
