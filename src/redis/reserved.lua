-- The records of reservations, in fields "reserved:<id>":
-- "end hold status quota limits time", where status is "open" or "settled:<quota>", limits
-- the hash of their text, and time that of the charge. An open record then has a line for each
-- charge: tag, two numbers (throttle: the interval in microseconds and nanoseconds; others:
-- the first two for "read"), units, mark, and the number in the field "reset:<tag>" then.
-- A reset of the state writes this field, so that no later settlement changes the state.
-- The field "reservations" is the latest end of all records, and then " r" if there is such a field.

local function field_of_id(id)
  return 'reserved:' .. id
end

local function read_record(value)
  local ends, hold, status, of, named, at, charges = string.match(value, '^(%d+) (%d+) (%l+:?%d*) (%d+) (%x+) (%d+)(.*)$')
  return {ends = tonumber(ends), hold = tonumber(hold), status = status, quota = of, named = named, at = tonumber(at),
    charges = charges}
end

-- Queues the record. "last" is the value of "reservations".
local function put_record(field, record, last)
  put(field, string.format('%.0f %.0f %s %s %s %.0f', record.ends, record.hold, record.status, record.quota, record.named,
    record.at) .. record.charges, record.ends - now)
  local latest, resets = string.match(last or '0', '^(%d+)(.*)$')
  if record.ends > latest + 0 then
    put('reservations', string.format('%.0f', record.ends) .. resets, record.ends - now)
  end
end

-- How long a record that has ended is kept at least, as in the sweep (expiry.lua).
local SLACK = least > 0 and 347133600000000 or 1000000

-- Deletes the records that have ended for so long, among n random fields. Returns how many.
local function delete_ended(n, slack)
  local ended, found = {}, call('HRANDFIELD', hash, n, 'WITHVALUES')
  for i = 1, #found, 2 do
    if string.sub(found[i], 1, 9) == 'reserved:' and string.match(found[i + 1], '^%d+') + slack <= now then
      ended[#ended + 1] = found[i]
    end
  end
  if #ended > 0 then
    call('HDEL', hash, unpack(ended))
  end
  return #ended
end

-- Sets l.resets of each limit to the number in the field "reset:<tag>". "last" is as above.
local function find_resets(limits, last)
  local resets = last and string.sub(last, -1) == 'r'
  for _, l in ipairs(limits) do
    local value = resets and call('HMGET', hash, 'reset:' .. l.tag)[1]
    l.resets = value and string.match(value, '^%d+') or '0'
  end
end
