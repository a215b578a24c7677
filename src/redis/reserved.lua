-- The records of reservations, in fields "reserved:<id>":
-- "end hold status quota limits", where status is "open" or "settled:<quota>", and limits
-- the hash of their text. An open record then has a line for each charge: algorithm, tag,
-- period, two numbers of the limit, units, time, mark, interval (throttle: microseconds and
-- nanoseconds, others: 0 0), and the number in the field "reset:<tag>" when it was charged.
-- A reset of the state writes this field, so that no later settlement changes the state.
-- The field "reservations" is the latest end of all records.

local function field_of_id(id)
  return 'reserved:' .. id
end

local function read_record(value)
  local ends, hold, status, of, named, at = string.match(value, '^(%d+) (%d+) (%l+:?%d*) (%d+) (%x+)()')
  return {ends = tonumber(ends), hold = tonumber(hold), status = status, quota = of, named = named,
    charges = string.sub(value, at)}
end

-- Queues the record. "last" is the value of "reservations".
local function put_record(field, record, last)
  put(field, string.format('%.0f %.0f %s %s %s', record.ends, record.hold, record.status, record.quota, record.named) ..
    record.charges, record.ends - now)
  if record.ends > (last or 0) + 0 then
    put('reservations', string.format('%.0f', record.ends), record.ends - now)
  end
end

-- Returns the number in the field "reset:<tag>".
local function reset_number(value)
  return value and string.match(value, '^%d+') or '0'
end
