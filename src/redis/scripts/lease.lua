-- Charges the quota to all limits or to none, and with it units for a lease. First refunds the
-- units that were left of earlier leases.
--
-- ARGV[2] is how many units are wanted beyond the quota for a lease of ARGV[4] microseconds,
-- ARGV[5] the number of leftovers. Then each limit has its LIMIT arguments, its interval
-- (throttle: microseconds and nanoseconds, others: 0 0), and for each leftover the CHARGE
-- arguments.
--
-- Returns what check.lua returns, and behind the other numbers: the units that are granted
-- beyond the quota, for how many microseconds they can be used, and the key's life, or 0.
--
-- The life is Redis's own time of the first lot, in the field "lease". It ends when the key is
-- deleted or a state is reset. A leftover of another life is lost.
--@ clock state algorithms act

local FIRST, CHARGE = 6, 5
local want, length, leftovers = tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[5])
local limits, ban, life = load_limits(2 + CHARGE * leftovers, FIRST, nil, 'lease')

local function refund_leftovers(l)
  for a = l.more + 2, l.more + 1 + CHARGE * leftovers, CHARGE do
    if (l.charged or l.used) > 0 and ARGV[a + CHARGE - 1] == life then
      local amount, rest, at, place = unpack(ARGV, a, a + CHARGE - 1)
      l:refund_charge(tonumber(at), tonumber(place), tonumber(amount), tonumber(rest))
      l.changed = true
    end
  end
  -- As load does for a state that has nothing in use.
  if l.used == 0 then
    local algorithm = l.algorithm
    --@ emptied of each
  end
end

-- Returns the time until the units that are charged now must not be used any more,
-- because others can be charged in their place; nil: no such time.
local function time_left(l)
  local algorithm, left = l.algorithm, nil
  --@ time_left of each
  return left
end

-- Returns the units that are free after the action, or fewer if there are very many.
local function free_units(l)
  local algorithm, free = l.algorithm, nil
  --@ free_units of each
  return free or l.capacity - l.used - quota
end

if leftovers > 0 then
  -- No hash has this field. A full Redis runs the writes after it.
  call('HDEL', hash, '')
end
for _, l in ipairs(limits) do
  l.interval_us, l.interval_ns = tonumber(ARGV[l.more]), tonumber(ARGV[l.more + 1])
  refund_leftovers(l)
end
local verdict, by = decide(limits, ban)
local extra, valid = 0, length
if verdict == 0 and want > 0 then
  for _, l in ipairs(limits) do
    valid = math.min(valid, time_left(l) or valid)
  end
  extra = math.floor(want * valid / length)
  for _, l in ipairs(limits) do
    extra = math.max(math.min(extra, math.floor(free_units(l) / 2)), 0)
  end
  for _, l in ipairs(limits) do
    local algorithm = l.algorithm
    --@ add_cost of each
  end
  quota = quota + extra
  if extra > 0 and not life then
    life = string.format('%.0f', real)
    put('lease', life, 0)
  end
end
local reply = {verdict, 0, now}
reply[2] = act(limits, verdict, reply, true)
reply[#reply + 1] = extra
reply[#reply + 1] = valid
reply[#reply + 1] = tonumber(life or 0)
reply[#reply + 1] = by
write()
return reply
