-- Functions for scripts that charge the quota to all limits or to none.
--
-- The numbers of a limit are, if its algorithm has "fits", the backlog before the action in
-- nanoseconds. Otherwise: 1 if the limit allows the action, the quota in use after it, the wait
-- until the same call can succeed, and that until nothing is in use, both in microseconds.

-- Counts a refusal (see count_refusal and ban_length in algorithm.c). Returns the length of the
-- ban that it starts, or 0.
local function count_refusal(l)
  local start, ends, count = now, now + l.period, 0
  if l.calendar then
    start, ends = l.start, l.ends
  end
  if l.refusals then
    local s, e, c = refusals(l, l.refusals)
    if l.calendar and s >= start and s <= (l.next or s) or
      not l.calendar and now < e and s - l.period <= now then
      start, ends, count = s, e, c
    end
  end
  count = count + 1
  local after, most = string.match(l.after, '^(%d+) (%d*)')
  if count >= after + 0 then
    drop(l.tag .. ':refused')
    local level = most ~= '' and call('HMGET', hash, 'ban:level')[1]
    local ends, grown = pair(level or '0 0')
    return now < ends and math.max(math.min(2 * grown, most + 0), l.ban) or l.ban
  end
  if l.calendar then
    put(l.tag .. ':refused', pair_text(start, ends) .. string.format(' %.0f', count),
      ends + CALENDAR_SLACK - now)
  else
    put(l.tag .. ':refused', pair_text(start, count), ends - now)
  end
  return 0
end

-- Queues the ban of this length that a limit sets, and its level if it grows.
local function put_ban(length, l)
  local most, why = string.match(l.after, '^%d+ (%d*) ?(.*)$')
  put('ban', pair_text(now + length, now) .. ' ' .. why, length)
  if most ~= '' then
    put('ban:level', pair_text(now + 2 * length, length), 2 * length)
  end
end

-- Returns true if the limit decides, but never refuses.
local function is_shadow(l)
  return string.sub(l.tag, -7) == ':shadow'
end

-- Returns the verdict of a key's limits and its field "ban", as check.lua does, and the limit
-- that set the ban. If all limits are shadow limits, a ban does not matter.
local function decide(limits, ban)
  local verdict = 0
  check_windows()
  for _, l in ipairs(limits) do
    if l.fits then
      l.allowed = l:fits()
    else
      l.allowed = l.used + quota <= l.capacity
    end
    if not l.allowed and not is_shadow(l) then
      verdict = -1
    end
  end
  --@ ban
  if left > 0 then
    for _, l in ipairs(limits) do
      if not is_shadow(l) then
        return left, by
      end
    end
  end
  return verdict
end

-- Acts on a key's limits by the verdict: charges the quota, or counts the refusal. A shadow
-- limit that an allowed action does not fit acts as if it were refused. Appends the numbers of
-- each limit to the reply. With commit, queues the writes. Returns the length of the ban that
-- this refusal starts, or 0.
local function act(limits, verdict, reply, commit)
  local brought, by = 0
  for _, l in ipairs(limits) do
    local verdict = verdict == 0 and not l.allowed and -1 or verdict
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
        local length = count_refusal(l)
        if length > brought then
          brought, by = length, l
        end
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
  if commit then
    for _, l in ipairs(limits) do
      if l.changed then
        l:save()
      end
    end
    if brought > 0 then
      put_ban(brought, by)
    end
  end
  return brought
end
