-- Charges the quota to all limits or to none. ARGV[2] is 1, or 0 to decide only
-- and change nothing.
--
-- Returns the verdict (0: allowed, -1: refused, else the rest of a ban in
-- microseconds), the length of the ban that this refusal starts (0: none), and
-- the time. Then come the numbers of each limit. For a limit whose algorithm has
-- "fits", it is the backlog before the action in nanoseconds. For other limits
-- they are: 1 if the limit allows the action, the quota in use after the action,
-- the wait until the same call can succeed, and the wait until nothing is in use,
-- both in microseconds. The row of the algorithm in C reads them ("decide").

local COMMIT = ARGV[2] == '1'

if not COMMIT then
  -- No hash has this field. A replica refuses to delete, so its old data is never read.
  redis.call('HDEL', hash, '')
end

-- Counts a refusal, in a window that begins with the first one and is one period
-- long. Returns the length of the ban that it starts, or 0.
local function count_refusal(l)
  local start, count = now, 0
  if l.refusals then
    local s, c = pair(l.refusals)
    if now < s + l.period then
      start, count = s, c
    end
  end
  count = count + 1
  if count >= l.after then
    drop(l.tag .. ':refused')
    return l.ban
  end
  put(l.tag .. ':refused', pair_text(start, count), start + l.period - now)
  return 0
end

local limits, ban = load_limits(0)
local verdict = 0
for _, l in ipairs(limits) do
  if l.fits then
    l.allowed = l:fits()
  else
    l.allowed = l.used + quota <= l.capacity
  end
  if not l.allowed then
    verdict = -1
  end
end
ban = ban and tonumber(ban) - now or 0
if ban > 0 then
  verdict = ban
end

local brought = 0
local reply = {verdict, 0, now}
for _, l in ipairs(limits) do
  if l.fits then
    reply[#reply + 1] = string.format('%.0f%03.0f', l.us, l.ns)
  end
  if quota > 0 and verdict == 0 then
    l:take()
    l.changed = true
  elseif quota > 0 and verdict == -1 then
    if l.count_denied then
      l:deny()
      l.changed = true
    end
    if not l.allowed and l.ban > 0 then
      brought = math.max(brought, count_refusal(l))
    end
  end
  if not l.fits then
    local needed = l.used + quota - l.capacity
    reply[#reply + 1] = l.allowed and 1 or 0
    reply[#reply + 1] = l.used
    reply[#reply + 1] = verdict ~= 0 and needed > 0 and quota <= l.capacity and l:wait(needed) or 0
    reply[#reply + 1] = l.used > 0 and l:reset() or 0
  end
end

if COMMIT then
  for _, l in ipairs(limits) do
    if l.changed then
      l:save()
    end
  end
  if brought > 0 then
    put('ban', string.format('%.0f', now + brought), brought)
  end
  write()
end
reply[2] = brought
return reply
