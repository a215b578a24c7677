-- Settles a reservation, or extends it. KEYS are its keys, and the last of them has its record. ARGV[2] is
-- its id, ARGV[3] the record's "keys" (reserved.lua), ARGV[4] its new hold in microseconds, or empty for the
-- same, and behind it there is for each key the quota that it is settled at, or empty to extend. Then there
-- may be for calendars: a tag, and its windows (see fixed_window.lua).
--
-- Returns 1, or 0 if there is no such reservation; or if it is settled now, for each key the quota
-- that was reserved and the two halves of the hash of its limits; or 3 if the hold is longer than
-- the period of one of its concurrent limits; or -n if it is of other keys, n is how many; or, if charges
-- need the windows of calendars, a line for each: its tag.
--@ clock slack

local FIRST = 5
-- See write() in state.lua.
call('HDEL', hash, '')
hash = KEYS[#KEYS]
local kept = call('HMGET', hash, 'reserved:' .. ARGV[2], 'born', 'expiry')
-- A settlement adds no field, so the clock chooses the calls that search: each fourth.
local n, slack = now % 4 == 0 and 8 or 0, SLACK
--@ delete_ended
--@ settle_simple
--@ state algorithms records

local CHARGE = '^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+)$'
local field, settles, new_hold = 'reserved:' .. ARGV[2], ARGV[FIRST] ~= '', tonumber(ARGV[4])
local record = kept[1] and read_record(kept[1])
expiry = kept[3]

if not record then
  return 0
elseif record.ends <= now then
  drop(field)
  write()
  return 0
elseif record.keys ~= ARGV[3] then
  return -string.match(record.keys, '^%d+')
elseif record.status ~= 'open' then
  return settles and 1 or 0
end

-- The keys with the limits that were charged.
local keys, reply, windows, missing = {}, {}, {}, {}
for a = FIRST + #KEYS, #ARGV, 2 do
  windows[ARGV[a]] = ARGV[a + 1]
end
for line in string.gmatch(record.charges, '\n([^\n]+)') do
  local quota, named = string.match(line, '^(%d+) (%x+)$')
  if quota then
    local i = #keys + 1
    keys[i] =
      {hash = KEYS[i], line = line, settled = tonumber(ARGV[FIRST + i - 1]), limits = {},
      names = {'born', 'expiry'}}
    reply[#reply + 1] = tonumber(quota)
    reply[#reply + 1] = tonumber(string.sub(named, 1, 8), 16)
    reply[#reply + 1] = tonumber(string.sub(named, 9), 16)
  else
    local key = keys[#keys]
    local tag, first, second, units, place, life = string.match(line, CHARGE)
    local algorithm, period = string.match(tag, '^([%l_]+):(%d*)')
    local l =
      setmetatable({tag = tag, period = tonumber(period), first = tonumber(first), second = tonumber(second),
      units = tonumber(units), place = tonumber(place), life = life, line = line, own = true},
        algorithms[algorithm])
    l:read(first, second, windows[tag] or '', '')
    if period == '' then
      l.calendar = true
      if settles and key.settled > l.units and not windows[tag] then
        missing[#missing + 1], windows[tag] = tag .. '\n', ''
      end
    end
    if l.held and (new_hold or 0) > l.period then
      return 3
    end
    local names = key.names
    names[#names + 1] = tag
    names[#names + 1] = l.denied_field and tag .. l.denied_field
    l.values = #names
    key.limits[#key.limits + 1] = l
  end
end
if #missing > 0 then
  return table.concat(missing)
end
for _, key in ipairs(keys) do
  hash = key.hash
  local values = call('HMGET', hash, unpack(key.names))
  local born = values[1]
  key.expiry = values[2]
  for _, l in ipairs(key.limits) do
    local value, denied = values[l.values]
    if l.denied_field then
      value, denied = values[l.values - 1], value
    end
    if value or not l.calendar or l.windows then
      l:load(value, denied)
    else
      l.used, l.charged = 0, 0
    end
    --@ life_of
    l.gone = not l.by_time and life ~= l.life
  end
end
check_windows()

-- Returns the amount of so many units, in two parts as in refund_charges.lua.
local function amount_of(l, units)
  local algorithm, amount, rest = l.algorithm, units, 0
  --@ amount of each
  return amount, rest
end

-- Refunds some of the units of a charge, less those that have been replenished since.
local function refund(l, units)
  if (l.charged or l.used) > 0 then
    local amount, rest = amount_of(l, units)
    l:refund_charge(record.at, l.place, amount, rest, l)
    l.changed = true
  end
end

-- Charges units to a limit whether they fit or not, as rl_owe in algorithm.c does.
local function owe(l, units)
  local algorithm = l.algorithm
  --@ owe of each
end

local function settle(key)
  for _, l in ipairs(key.limits) do
    local more = key.settled - l.units
    if l.held or more < 0 then
      if not l.gone then
        refund(l, l.held and 1 or -more)
      end
    elseif more > 0 then
      owe(l, more)
      l.changed = true
    end
  end
end

-- Starts the hold of the key's units again. Returns false if one is not held any more.
local function extend(key, lines)
  lines[#lines + 1] = '\n' .. key.line
  for _, l in ipairs(key.limits) do
    if l.held then
      local used = l.used
      refund(l, 1)
      if l.used == used then
        return false
      end
      quota, l.hold = 1, record.hold
      l:take_own()
    end
    lines[#lines + 1] = '\n' .. string.gsub(l.line, '%d+ (%d+)$', string.format('%.0f %%1', l.place))
  end
  return true
end

-- A log also queues writes before it is saved.
local lines = {}
record.hold = new_hold or record.hold
for _, key in ipairs(keys) do
  hash, set, gone, longest = key.hash, {}, {}, 0
  if settles then
    settle(key)
  elseif not extend(key, lines) then
    return 0
  end
  for _, l in ipairs(key.limits) do
    if l.changed then
      l:save()
    end
  end
  key.set, key.gone, key.longest = set, gone, longest
end
if settles then
  record.ends = now + math.min(record.hold, 3600000000)
  record.status = 'settled:' .. ARGV[FIRST + #KEYS - 1]
else
  record.ends = now + record.hold
end
record.charges = table.concat(lines)
put_record(field, record)
keys[#keys].longest = longest
for _, key in ipairs(keys) do
  hash, set, gone, longest, expiry = key.hash, key.set, key.gone, key.longest, key.expiry
  write()
end
return settles and reply or 1
