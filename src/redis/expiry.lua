-- Parts of the scripts that take quota. The first reads the field "ban": it sets "left" to the
-- rest of the ban in microseconds, or 0, and "by" to "limit " and the limit that set it, or
-- nil.
--< ban(ban) -> left, by
local left, by = 0
if ban then
  left = string.match(ban, '^%d+') - now
  by = left > 0 and string.match(string.sub(ban, 1, 300), '^%d+ %d+ (limit [ -~]+)$') or nil
end
-->

-- Parts of the scripts that write: the expiry of a hash, and the end of old states. The expiry only
-- frees memory, and setting it costs time. So it need not be exact, only late enough for all fields.
-- A call that must set the expiry sets it later than the fields need, so that most later calls can leave it.
--
-- The field "expiry" has a copy of it, in milliseconds of Redis's own clock. Redis's expiry is read as
-- well, because another program may have changed it: if it is missing, or earlier than the copy, it is
-- set again. If there is neither, the hash may have fields of any age: it gets a hundred years.

-- Sets "expires" to the new expiry, or to nil if it stays. The hash is needed for
-- "needed" microseconds.
--< expiry(expiry, needed) -> expires
if needed < least then
  needed = least
end
local ends = (real + needed) / 1000 + 1
local kept, found, expires = (expiry or 0) + 0, call('PEXPIRETIME', hash)
if ends > kept or found < kept then
  if found == -1 and not expiry then
    kept = real / 1000 + 3155760000000
  elseif ends > kept then
    kept = ends + math.min(math.max(needed / 4000, 1000), 3600000)
  end
  expires = string.format('%.0f', math.max(kept, found))
  if found == -1 then
    -- A hash keeps no expiry if the user must not set it. Then this fails before the charge.
    call('PEXPIREAT', hash, expires)
  end
end
-->

-- The charge is made by HSET. What comes behind it must not fail, because a call that fails is
-- taken for one that has charged nothing.
--< keep(tag, text, expiry, expires)
local added
if expires then
  added = call('HSET', hash, tag, text, 'expiry', expires)
  redis.pcall('PEXPIREAT', hash, expires)
else
  added = call('HSET', hash, tag, text)
end
--@ sweep
-->

--< keep_all(set, expiry, expires)
if expires then
  set[#set + 1] = 'expiry'
  set[#set + 1] = expires
end
local added = call('HSET', hash, unpack(set)) - (set.records or 0)
if expires then
  redis.pcall('PEXPIREAT', hash, expires)
end
--@ sweep
-->

-- Deletes states that have ended, from a hash whose expiry was set or that has got a field, as
-- few calls do. (reserve.lua sets set.records to the number of fields that do not count.) Looks
-- at some random fields, and goes on while half of them have ended. So most fields of a hash
-- have not, however many texts of limits were used.
--
-- A state is kept for a second longer, for clocks that differ or are set back a little; if
-- a test sets the time, for 11 years, because it also sets it back. Other fields and values are
-- kept.
--< sweep(expiry, expires, added)
if expiry and (expires or added > 0) then
  local match = string.match
  local slack = least > 0 and 347133600000000 or 1000000
  local sample, rounds, most = 8, 24, 64
  if KEYS[2] then
    sample, rounds, most = 2, 1, 16
  end

  -- Returns the field of the state to which a field belongs.
  local function state_of(field)
    local algorithm, state = match(field, '^[%l_]+'), field
    --@ state_of of each
    return state
  end

  -- Returns the end of a state; of a log with chunks also the first number that may have a
  -- field, and the next number. Raises an error if the value is invalid.
  local function end_of(field, value)
    local algorithm, rest = match(field, '^([%l_]+):(.*)$')
    local ends, dead, next
    if field == 'ban' or field == 'ban:level' or algorithm == 'reserved' or algorithm == 'mark' then
      ends = match(value, '^%d+')
    elseif algorithm == 'reset' then
      ends = match(value, '^%d+ (%d+)$')
    elseif algorithm and match(rest, '^%d.*:refused$') then
      ends = match(value, '^(%d+) ') + match(rest, '^%d+')
    elseif algorithm and match(rest, ':refused$') then
      -- A calendar, and its slack (see state.lua).
      ends = match(value, '^%d+ (%-?%d+) ') + 172800000000
    else
      --@ ends of each
    end
    return ends and ends + 0, dead, next
  end

  pcall(function()
    local dropped = 0
    repeat
      local states, gone, ended = {}, {}, 0
      for _, field in ipairs(call('HRANDFIELD', hash, sample)) do
        local state = state_of(field)
        if not states[state] then
          states[#states + 1], states[state] = state, true
        end
      end
      for i, value in ipairs(call('HMGET', hash, unpack(states))) do
        local valid, ends, dead, next = pcall(end_of, states[i], value)
        if valid and ends and ends + slack < now then
          local upto = math.min(next or 0, (dead or 0) + most)
          for n = dead or 0, upto - 1 do
            gone[#gone + 1] = string.format('%s:%.0f', states[i], n)
          end
          if upto < (next or 0) + 0 then
            call('HSET', hash, states[i], string.format('0 %.0f %s 0 0 %s ', upto, next, next))
          else
            gone[#gone + 1] = states[i]
          end
          gone[#gone + 1] = next and states[i] .. ':chunks'
          ended = ended + 1
        end
      end
      if ended > 0 then
        call('HDEL', hash, unpack(gone))
      end
      rounds, dropped = rounds - 1, dropped + #gone
    until ended * 2 < #states or rounds == 0 or dropped >= 512
  end)
end
-->
