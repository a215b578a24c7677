-- The records of reservations, in fields "reserved:<id>" of an action's last key:
-- "end hold status quota action keys time", where status is "open" or "settled:<quota>", both quotas
-- are of the last key, action is the hash of all keys, limits and quotas, or of one key its limits' hash,
-- keys their number, with the hash of the keys if there are several ("2:<hash>"), and time that of the
-- charge. An open record then has a line for each key, "quota limits", with quota 0 if nothing was charged,
-- and limits as the hash of their text; and behind it a line for each charge of the key: tag, two numbers
-- (throttle: the interval in microseconds and nanoseconds; others: the first two for "read"), units, place,
-- and the life of the state (life.lua). In another life, a settlement refunds nothing to a counter.

-- A record that has ended is kept for so long at least, as in the sweep (expiry.lua).
--< slack() -> SLACK
local SLACK = least > 0 and 347133600000000 or 1000000
-->

-- Deletes the records that have ended for "slack" microseconds, among "n" random fields. Others
-- may be chunks of logs, whose values would take long. "found" are the records, "ended" those deleted.
--< delete_ended(n, slack) -> ended, found, records
local ended, found = {}, {}
for _, name in ipairs(n > 0 and call('HRANDFIELD', hash, n) or {}) do
  if string.sub(name, 1, 9) == 'reserved:' then
    found[#found + 1] = name
  end
end
local records = #found > 0 and call('HMGET', hash, unpack(found)) or found
for i, value in ipairs(records) do
  if string.match(value, '^%d+') + slack <= now then
    ended[#ended + 1] = found[i]
  end
end
if #ended > 0 then
  call('HDEL', hash, unpack(ended))
end
-->

-- Parts of list.lua, for reserve.lua. A limit without a part "list_place" is for the functions, as are a
-- record, a reset and a second key.
--< list_call
local simple, field, charges = not KEYS[2], 'reserved:' .. ARGV[2], ''
local names, begin, stride, at, of = {'ban', 'expiry', field, 'born'}, 9, 13, 5, 6
-->

--< list_charge
local place
--@ list_place of each
if place then
  charges = charges .. '\n' .. name .. ' ' .. ARGV[a + 10] .. ' ' .. ARGV[a + 11] .. ' ' .. ARGV[of] .. ' ' ..
    place .. ' ' .. (values[4] or string.format('%.0f', real))
else
  simple = false
end
-->

--< list_end
local slack, born, fields = SLACK, values[4], call('HLEN', hash)
simple = simple and not values[3] and not (born and string.sub(born, -1) == 'r') and
  fields < MOST_RECORDS
if simple then
  local n = fields % EACH == 0 and SOUGHT or 0
  --@ delete_ended
  if not born then
    set[#set + 1], set[#set + 2] = 'born', string.format('%.0f', real)
  end
  local hold = ARGV[3] + 0
  local since, ends = now % 100000000, (now + hold) % 100000000
  set[#set + 1], set[#set + 2] = field,
    string.format('%d%08d ', (now + hold - ends) / 100000000, ends) .. ARGV[3] .. ' open ' .. ARGV[of] .. ' ' ..
    action .. ' ' .. ARGV[5] .. string.format(' %d%08d\n', (now - since) / 100000000, since) .. ARGV[of] .. ' ' ..
    ARGV[8] .. charges
  if hold > needed then
    needed = hold
  end
  set.records = born and 1 or 2
  reply[#reply + 1] = 0
end
-->

--< records
local function read_record(value)
  local ends, hold, status, of, action, keys, at, charges =
    string.match(value, '^(%d+) (%d+) (%l+:?%d*) (%d+) (%x+) (%S+) (%d+)(.*)$')
  return {ends = tonumber(ends), hold = tonumber(hold), status = status, quota = of, action = action,
    keys = keys,
    at = tonumber(at), charges = charges}
end

-- Queues the record.
local function put_record(field, record)
  put(field,
    string.format('%.0f %.0f %s %s %s %s %.0f', record.ends, record.hold, record.status, record.quota,
    record.action,
    record.keys, record.at) .. record.charges, record.ends - now)
end
-->
