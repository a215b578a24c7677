-- GCRA, one limit: takes quota, or looks if the cost is 0.
--
-- ARGV[2] field of the TAT; ARGV[3], ARGV[4] cost of the quota; ARGV[5],
-- ARGV[6] the longest backlog that leaves room for it: each in microseconds
-- and the nanoseconds that are left. Returns the backlog before the action in
-- nanoseconds, negative if refused, and as text if it is too long for a
-- number. Under a ban returns two: what is left of it in microseconds, and
-- the backlog.

local state = redis.call('HMGET', hash, ARGV[2], 'ban')
local us, ns = backlog(state[1])

local ban = state[2] and tonumber(state[2]) - now or 0
if ban > 0 then
  return {string.format('%.0f', ban), string.format('%.0f%03.0f', us, ns)}
end

local sign = 1
local room = tonumber(ARGV[5])
if us > room or us == room and ns > tonumber(ARGV[6]) then
  sign = -1
else
  local cost_us, cost_ns = tonumber(ARGV[3]), tonumber(ARGV[4])
  if cost_us > 0 or cost_ns > 0 then
    put(ARGV[2], us + cost_us, ns + cost_ns)
  end
end

if us < 9000000000000 then
  return sign * (us * 1000 + ns)
end
return string.format('%.0f%03.0f', sign * us, ns)
