-- Charges the quota to all limits or to none, and then keeps the charges as a record.
--
-- ARGV[2] is the id, ARGV[4] the time that the record is kept, in microseconds, and ARGV[5]
-- the hash of the limits. Each limit has its LIMIT arguments, then its interval (throttle:
-- microseconds and nanoseconds, others: 0 0), and its own quota.
--
-- Returns what check.lua returns, with a number more behind the limits' numbers: 0, or if
-- there is a record with this id already 1 if it is open, 2 if it is settled; then
-- nothing is charged, and the numbers are those of quota 0. Returns only 3 if that record has
-- another quota or other limits, and 4 if the key has too many records for one more.
--@ clock

-- The most records of a key, and how many random fields a call then searches for those that have ended.
local MOST_RECORDS, SEARCHED = 4096, 512
--@ slack
--@ list of reserved
--@ state used act records

local FIRST, MORE = 6, 3
local field, hold, named = 'reserved:' .. ARGV[2], tonumber(ARGV[4]), ARGV[5]
for a = FIRST, #ARGV, LIMIT + MORE do
  use(ARGV[a])
end
local limits, ban, old, last = load_limits(MORE, FIRST, nil, field, 'reservations')
local record = old and read_record(old)
local one = {}

if record and record.ends > now then
  -- No hash has this field. A replica refuses to delete, so its old data is never read.
  call('HDEL', hash, '')
  if record.quota ~= ARGV[3] or record.named ~= named then
    return 3
  end
  quota = 0
  local reply = {0, 0, now}
  for _, l in ipairs(limits) do
    one[1] = l
    decide(one)
    act(one, -1, reply, false)
  end
  reply[#reply + 1] = record.status == 'open' and 1 or 2
  return reply
end

local verdict, by = 0
for _, l in ipairs(limits) do
  one[1], quota = l, tonumber(ARGV[l.more + 2])
  local own, set_by = decide(one, ban)
  if verdict <= 0 and own ~= 0 then
    verdict, by = own, set_by
  end
end
if verdict == 0 and not old then
  local n, slack, fields = 2, SLACK, call('HLEN', hash)
  if fields >= MOST_RECORDS then
    n, slack = SEARCHED, 0
  end
  --@ delete_ended
  -- There is no number of records, which could be wrong. If many fields are of other kinds, the
  -- share of records among those searched is near enough, with a quarter for chance.
  if n == SEARCHED and #ended == 0 and fields * #found / SEARCHED >= MOST_RECORDS * 3 / 4 then
    call('HDEL', hash, '')
    return 4
  end
end
if verdict == 0 then
  find_resets(limits, last)
end

local reply, brought, setter, charges = {verdict, 0, now}, 0, nil, ''
for _, l in ipairs(limits) do
  local a = l.more - LIMIT
  one[1], quota = l, tonumber(ARGV[l.more + 2])
  if l.log then
    l.take, l.hold = l.take_own, ARGV[a] == 'concurrent' and hold
  end
  local length = act(one, verdict, reply, false)
  if length > brought then
    brought, setter = length, l
  end
  if verdict == 0 and l.allowed then
    --@ place_of
    local n = l.fits and l.more or a + 3
    charges = charges .. string.format('\n%s %s %s %.0f %.0f %s', l.tag, ARGV[n], ARGV[n + 1] == '' and '0' or ARGV[n + 1],
      quota, place, l.resets)
  end
  if l.changed then
    l:save()
  end
end
if brought > 0 then
  put_ban(brought, setter)
end
if verdict == 0 then
  put_record(field, {ends = now + hold, hold = hold, status = 'open', quota = ARGV[3], named = named, at = now, charges = charges}, last)
  set.records = old and 0 or 1
end
reply[2] = brought
reply[#reply + 1] = 0
reply[#reply + 1] = by
write()
return reply
