-- Settles a reservation, or extends it. ARGV[2] is its id, ARGV[3] the quota that it is
-- settled at, or empty to extend it. ARGV[4] is its new hold in microseconds, or empty for
-- the same. Then there may be for a calendar: the tag, and its windows (see fixed_window.lua).
--
-- Returns 1, or 0 if there is no such reservation; or if it is settled now, the quota that was
-- reserved and the two halves of the hash of its limits; or 3 if the hold is longer than the period
-- of its concurrent limit; or, if a charge needs the windows of calendars, a line for each of
-- them: its tag.
--@ clock slack

-- See write() in state.lua.
call('HDEL', hash, '')
local kept, n, slack = call('HMGET', hash, 'reserved:' .. ARGV[2], 'reservations', 'expiry'), 2, SLACK
--@ delete_ended
--@ settle_simple
--@ state used records

local CHARGE = '^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+)$'
local field, settled, new_hold = 'reserved:' .. ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local windows = {}
for a = 5, #ARGV, 2 do
  windows[ARGV[a]] = ARGV[a + 1]
end
local record, last = kept[1] and read_record(kept[1]), kept[2]
expiry = kept[3]

if not record then
  return 0
elseif record.ends <= now then
  drop(field)
  write()
  return 0
elseif record.status ~= 'open' then
  return settled and 1 or 0
end

-- The limits that were charged, with their states. "gone" is true if the state was reset.
local limits, names, missing = {}, {}, ''
for line in string.gmatch(record.charges, '\n([^\n]+)') do
  local tag, first, second, units, mark, reset = string.match(line, CHARGE)
  local algorithm, period = string.match(tag, '^([%l_]+):(%d*)')
  local l = setmetatable({tag = tag, period = tonumber(period), us_each = tonumber(first), ns_each = tonumber(second),
    units = tonumber(units), mark = tonumber(mark), reset_was = reset, line = line, is_held = algorithm == 'concurrent',
    own = true}, use(algorithm))
  if not l.fits then
    l:read(first, second, windows[tag] or '', '')
  end
  if period == '' then
    l.calendar = true
    if settled and settled > l.units and not windows[tag] then
      missing = missing .. tag .. '\n'
    end
  end
  if l.is_held and (new_hold or 0) > l.period then
    return 3
  end
  limits[#limits + 1] = l
  names[#names + 1] = tag
  names[#names + 1] = l.denied_field and tag .. l.denied_field
  l.values = #names
end
if missing ~= '' then
  return missing
end
find_resets(limits, last)
local values = #names > 0 and call('HMGET', hash, unpack(names)) or {}
for _, l in ipairs(limits) do
  local value, denied = values[l.values]
  if l.denied_field then
    value, denied = values[l.values - 1], value
  end
  if value or not l.calendar or l.windows then
    l:load(value, denied)
  else
    l.used, l.charged = 0, 0
  end
  -- 0: there was no reset, or its field has ended, as all records from before it have. An entry of a
  -- log is found by its time.
  l.gone = not l.log and l.resets ~= '0' and l.resets ~= l.reset_was
end
check_windows()

-- Returns the time that so many units add to a throttle's backlog, in us and ns.
local function cost(l, units)
  local us_each, ns_each = l.us_each, l.ns_each
  --@ cost_of_units
  return cost_us, cost_ns
end

-- Refunds some of the units of a charge, less those that have been replenished since.
local function refund(l, units)
  if (l.charged or l.used) > 0 then
    local amount, ns = units, 0
    if l.fits then
      amount, ns = cost(l, units)
    end
    l:refund_charge(record.at, l.mark, amount, ns, l)
    l.changed = true
  end
end

local function settle()
  for _, l in ipairs(limits) do
    if l.is_held or settled < l.units then
      if not l.gone then
        refund(l, l.is_held and 1 or l.units - settled)
      end
    elseif settled > l.units then
      l:owe(settled - l.units, cost(l, settled - l.units))
      l.changed = true
    end
  end
  record.ends = now + math.min(record.hold, 3600000000)
  record.status = string.format('settled:%.0f', settled)
  record.charges = ''
end

-- Starts the hold again. Returns false if a unit is not held any more.
local function extend()
  local lines = {}
  record.hold = new_hold or record.hold
  for _, l in ipairs(limits) do
    if l.is_held then
      local used = l.used
      refund(l, 1)
      if l.used == used then
        return false
      end
      quota, l.hold = 1, record.hold
      l:take_own()
    end
    lines[#lines + 1] = '\n' .. string.gsub(l.line, '%d+ (%d+)$', string.format('%.0f %%1', l.mark))
  end
  record.ends = now + record.hold
  record.charges = table.concat(lines)
  return true
end

if settled then
  settle()
elseif not extend() then
  return 0
end
for _, l in ipairs(limits) do
  if l.changed then
    l:save()
  end
end
put_record(field, record, last)
write()
if settled then
  return {tonumber(record.quota), tonumber(string.sub(record.named, 1, 8), 16), tonumber(string.sub(record.named, 9), 16)}
end
return 1
