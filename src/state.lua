-- What all scripts but throttle.lua share: there it is written out, because
-- making functions would take a tenth of its time.

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

-- Keeps the hash for at least so many microseconds. GT serves a hash that has
-- an expiry, NX one that has none.
local function keep(us)
  local ms = string.format('%.0f', math.max(us / 1000, least_ttl) + 1)
  if redis.call('PEXPIRE', hash, ms, 'GT') == 0 then
    redis.call('PEXPIRE', hash, ms, 'NX')
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
