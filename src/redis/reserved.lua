-- The records of reservations, in fields "reserved:<id>":
-- "end hold status quota limits time", where status is "open" or "settled:<quota>", limits
-- the hash of their text, and time that of the charge. An open record then has a line for each
-- charge: tag, two numbers (throttle: the interval in microseconds and nanoseconds; others:
-- the first two for "read"), units, mark, and the number in the field "reset:<tag>" then.
-- A reset of the state writes this field, so that no later settlement changes the state.
-- The field "reservations" is the latest end of all records, and then " r" if there is such a field.

-- A record that has ended is kept for so long at least, as in the sweep (expiry.lua).
--< slack() -> SLACK
local SLACK = least > 0 and 347133600000000 or 1000000
-->

-- Deletes the records that have ended for "slack" microseconds, among "n" random fields. Others
-- may be chunks of logs, whose values would take long.
--< delete_ended(n, slack)
local ended, found = {}, {}
for _, name in ipairs(call('HRANDFIELD', hash, n)) do
  if string.sub(name, 1, 9) == 'reserved:' then
    found[#found + 1] = name
  end
end
for i, value in ipairs(#found > 0 and call('HMGET', hash, unpack(found)) or found) do
  if string.match(value, '^%d+') + slack <= now then
    ended[#ended + 1] = found[i]
  end
end
if #ended > 0 then
  call('HDEL', hash, unpack(ended))
end
-->

-- Parts of list.lua, for reserve.lua. A log's entry would be the reservation's own, and a
-- record or a reset is for the functions too.
--< list_call
local simple, field, charges = true, 'reserved:' .. ARGV[2], ''
local names, begin, stride, at = {'ban', 'expiry', field, 'reservations'}, 6, 13, 5
-->

--< list_name
simple = simple and ARGV[a] ~= 'sliding_log'
-->

--< list_charge
local n, mark = a + 10, '0'
if algorithm ~= 'throttle' then
  n, mark = a + 3, string.match(written, algorithm == 'sliding_window' and ' (%d+):' or '^%d+')
end
if algorithm == 'token_bucket' and mark + 0 > now then
  simple = false
end
charges = charges .. string.format('\n%s %s %s %s %s 0', name, ARGV[n], ARGV[n + 1] == '' and '0' or ARGV[n + 1], ARGV[3], mark)
-->

--< list_end
local n, slack, last = 2, SLACK, values[4] or '0'
simple = simple and not values[3] and string.sub(last, -1) ~= 'r' and call('HLEN', hash) < MOST_RECORDS
if simple then
  --@ delete_ended
  local hold = ARGV[4] + 0
  local ends = string.format('%.0f', now + hold)
  set[#set + 1], set[#set + 2] = field, string.format('%s %s open %s %s %.0f', ends, ARGV[4], ARGV[3], ARGV[5], now) .. charges
  if ends + 0 > last + 0 then
    set[#set + 1], set[#set + 2] = 'reservations', ends
  end
  if hold > needed then
    needed = hold
  end
  set.records = 1
  reply[#reply + 1] = 0
end
-->

--< records
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

-- Sets l.resets of each limit to the number in the field "reset:<tag>", or to 0 if that has ended:
-- the sweep may have deleted "reservations" before it. "last" is as above.
local function find_resets(limits, last)
  local resets = last and string.sub(last, -1) == 'r'
  for _, l in ipairs(limits) do
    l.resets = '0'
    if resets then
      --@ reset_of
      l.resets = reset or '0'
    end
  end
end
-->
