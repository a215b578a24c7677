-- What all scripts share; it is put in front of each.
--
-- KEYS[1] is a key's hash. ARGV[1] is the time in microseconds, or empty for
-- Redis's own clock. Numbers stay below 2^53; they become text by %.0f.
-- A theoretical arrival time (TAT) is kept as decimal nanoseconds since 1970,
-- too long for a Lua number, so it is read as microseconds and nanoseconds.

local hash = KEYS[1]
local now = tonumber(ARGV[1])
local virtual = now
if not now then
  local clock = redis.call('TIME')
  now = clock[1] * 1000000 + clock[2]
end

-- How far a TAT, if there is one, lies after now.
local function backlog(tat)
  if tat then
    local us = tonumber(string.sub(tat, 1, -4)) - now
    if us >= 0 then
      return us, tonumber(string.sub(tat, -3))
    end
  end
  return 0, 0
end

-- Keeps the hash for at least so many microseconds. NX serves a hash that has
-- no expiry, GT one that has. Virtual time does not pass while a test sleeps.
local function keep(us)
  local ms = math.floor(us / 1000) + 1
  if virtual and ms < 3600000 then
    ms = 3600000
  end
  local text = string.format('%.0f', ms)
  if redis.call('PEXPIRE', hash, text, 'GT') == 0 then
    redis.call('PEXPIRE', hash, text, 'NX')
  end
end

-- Sets a TAT to so much after now; parts of the nanoseconds may be out of
-- range by less than 1000 either way.
local function put(field, us, ns)
  if ns >= 1000 then
    us, ns = us + 1, ns - 1000
  elseif ns < 0 then
    us, ns = us - 1, ns + 1000
  end
  if us < 0 then
    us, ns = 0, 0
  end
  redis.call('HSET', hash, field, string.format('%.0f%03.0f', now + us, ns))
  keep(us)
end
