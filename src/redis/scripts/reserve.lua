-- Charges the quota to all limits or to none, and then keeps the charges as a record.
--
-- ARGV[2] is the id, ARGV[4] the time that the record is kept, in microseconds, and ARGV[5]
-- the hash of the limits. Each limit has its LIMIT arguments, then its interval (throttle:
-- microseconds and nanoseconds, others: 0 0), and its own quota.
--
-- Returns what check.lua returns, with a number more behind the limits' numbers: 0, or if
-- there is a record with this id already 1 if it is open, 2 if it is settled; then
-- nothing is charged, and the numbers are those of quota 0. Returns only 3 if that record has
-- another quota or other limits, and 4 if the key has too many fields for one more record.
--@ clock state algorithms act reserved

-- The most fields of a hash in which a record is made.
local MOST_FIELDS = 2048
local FIRST, MORE = 6, 3
local field, hold, named = field_of_id(ARGV[2]), tonumber(ARGV[4]), ARGV[5]
local limits, ban = load_limits(MORE, FIRST)
local names = {field, 'reservations'}
for _, l in ipairs(limits) do
  names[#names + 1] = 'reset:' .. l.tag
end
local kept = call('HMGET', hash, unpack(names))
local record = kept[1] and read_record(kept[1])

if record and record.ends > now then
  if record.quota ~= ARGV[3] or record.named ~= named then
    return 3
  end
  quota = 0
  local reply = {0, 0, now}
  for _, l in ipairs(limits) do
    decide({l})
    act({l}, -1, reply, false)
  end
  reply[#reply + 1] = record.status == 'open' and 1 or 2
  -- No hash has this field. A replica refuses to delete, so its old data is never read.
  call('HDEL', hash, '')
  return reply
end

-- Deletes the records that have ended.
local function delete_ended()
  local ended, values = {}, call('HRANDFIELD', hash, call('HLEN', hash), 'WITHVALUES')
  for i = 1, #values, 2 do
    if string.sub(values[i], 1, 9) == 'reserved:' and string.match(values[i + 1], '^%d+') + 0 <= now then
      ended[#ended + 1] = values[i]
    end
  end
  for i = 1, #ended, 1000 do
    call('HDEL', hash, unpack(ended, i, math.min(i + 999, #ended)))
  end
end

local verdict, by = 0
for _, l in ipairs(limits) do
  quota = tonumber(ARGV[l.more + 2])
  local own, set_by = decide({l}, ban)
  if verdict <= 0 and own ~= 0 then
    verdict, by = own, set_by
  end
end
if verdict == 0 and not kept[1] and call('HLEN', hash) >= MOST_FIELDS then
  delete_ended()
  if call('HLEN', hash) >= MOST_FIELDS then
    return 4
  end
end

local reply, brought, setter, charges = {verdict, 0, now}, 0, nil, {}
for i, l in ipairs(limits) do
  quota = tonumber(ARGV[l.more + 2])
  local length = act({l}, verdict, reply, false)
  if length > brought then
    brought, setter = length, l
  end
  if verdict == 0 and l.allowed then
    local mark = l.anchor or l.start or l.k or l.newest or 0
    if l.anchor and mark > now then
      mark = mark - math.ceil((mark - now) / l.period) * l.period
    end
    local a = l.more - LIMIT
    local first, second = ARGV[a + 3], ARGV[a + 4]
    if l.fits then
      first, second = '0', '0'
    end
    charges[#charges + 1] = string.format('\n%s %s %s %s %s %.0f %.0f %.0f %s %s %s', ARGV[a], l.tag, ARGV[a + 2], first,
      second == '' and '0' or second, quota, now, mark, ARGV[l.more], ARGV[l.more + 1], reset_number(kept[2 + i]))
  end
  if l.changed then
    l:save()
  end
end
if brought > 0 then
  put('ban', pair_text(now + brought, now) .. string.match(setter.after, '^%d+(.*)$'), brought)
end
if verdict == 0 then
  put_record(field, {ends = now + hold, hold = hold, status = 'open', quota = ARGV[3], named = named,
    charges = table.concat(charges)}, kept[2])
end
reply[2] = brought
reply[#reply + 1] = 0
reply[#reply + 1] = by
write()
return reply
