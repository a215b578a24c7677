-- The script of rl_throttle before the expiry was set in steps: the unit of the column
-- "x before" of script/bench --scripts, which makes its arguments: the time or empty, the
-- tag, and then the cost and the room, each in microseconds and nanoseconds.

local hash = KEYS[1]
local now = tonumber(ARGV[1])
local least_ttl = 0
-- For a hash that has lost its expiry: a hundred years in milliseconds. No
-- field is needed for longer.
local lost_ttl = '3155760000000'
if now then
  -- A time that a test sets does not pass: keep everything for an hour.
  least_ttl = 3600000
else
  local clock = redis.call('TIME')
  now = clock[1] * 1000000 + clock[2]
end

local tag = ARGV[2]
local state = redis.call('HMGET', hash, tag, 'ban')
local tat, ban = state[1], state[2]
local us, ns = 0, 0
if tat then
  us = tonumber(string.sub(tat, 1, -4)) - now
  if us >= 0 then
    ns = tonumber(string.sub(tat, -3))
  else
    us = 0
  end
end

if ban then
  ban = tonumber(ban) - now
  if ban > 0 then
    return {string.format('%.0f', ban), string.format('%.0f%03.0f', us, ns)}
  end
end

local sign = 1
local room_us = tonumber(ARGV[5])
if us > room_us or us == room_us and ns > tonumber(ARGV[6]) then
  sign = -1
else
  local tat_us, tat_ns = us + tonumber(ARGV[3]), ns + tonumber(ARGV[4])
  if tat_us > us or tat_ns > ns then
    if tat_ns >= 1000 then
      tat_us, tat_ns = tat_us + 1, tat_ns - 1000
    end
    redis.call('HSET', hash, tag, string.format('%.0f%03.0f', now + tat_us, tat_ns))
    local ms = string.format('%.0f', math.max(tat_us / 1000, least_ttl) + 1)
    -- GT is for a hash with an expiry. NX is for a new hash, or one that has lost
    -- its expiry. The likely case comes first.
    local had_none
    if tat then
      had_none = redis.call('PEXPIRE', hash, ms, 'GT') == 0 and redis.call('PEXPIRE', hash, ms, 'NX') == 1
    else
      had_none = redis.call('PEXPIRE', hash, ms, 'NX') == 1
      if not had_none then
        redis.call('PEXPIRE', hash, ms, 'GT')
      end
    end
    if had_none and redis.call('HLEN', hash) > 1 then
      redis.call('PEXPIRE', hash, lost_ttl)
    end
  end
end

if us < 9000000000000 then
  return sign * (us * 1000 + ns)
end
return string.format('%.0f%03.0f', sign * us, ns)
