-- Charges an action to the limits of one to eight keys or to none of them, and then keeps the charges
-- as a record of the last key.
--
-- ARGV[2] is the id, ARGV[3] the time that the record is kept, in microseconds, ARGV[4] and ARGV[5]
-- the record's "action", empty for one key, and "keys" (reserved.lua). Then there are for each key: its
-- quota, the number of its limits, the hash of their text, and the limits. Each limit has its LIMIT
-- arguments, then its two numbers for the record, and its own quota. A key may have no limits.
--
-- Returns for each key what check_all.lua returns, and behind all numbers one more: 0, or if
-- there is a record with this id already 1 if it is open, 2 if it is settled; then
-- nothing is charged, and the numbers are those of quota 0. Returns only 0 if the last key has
-- too many records for one more, and if that record is of another action, only -n, where n is how
-- many keys it has.
--@ clock

-- The most records of a key. A call then searches SEARCHED random fields for records that have ended, and
-- if there are none, deletes FORGOTTEN that are settled. With fewer records, a call searches SOUGHT random
-- fields if the number of fields is a multiple of EACH: that often, because a call adds a field.
local MOST_RECORDS, SOUGHT, EACH, SEARCHED, FORGOTTEN = 4096, 8, 4, 128, 16
-- Of one key, the hash of its limits.
local action = ARGV[4] ~= '' and ARGV[4] or ARGV[8]
--@ slack
--@ list of reserved
--@ state algorithms act records

local FIRST, MORE = 6, 3
local field, hold = 'reserved:' .. ARGV[2], tonumber(ARGV[3])
local keys, at, one = {}, FIRST, {}
for i, name in ipairs(KEYS) do
  local from, key = at + 3, {hash = name, quota = tonumber(ARGV[at]), named = ARGV[at + 2]}
  at = from + ARGV[at + 1] * (LIMIT + MORE)
  hash = name
  key.limits, key.ban, key.born, key.old =
    load_limits(MORE, from, at - 1, 'born', i == #KEYS and field or nil)
  key.expiry = expiry
  keys[i] = key
end
local last = keys[#keys]
local record = last.old and read_record(last.old)

if record and record.ends > now then
  -- No hash has this field. A replica refuses to delete, so its old data is never read.
  call('HDEL', last.hash, '')
  if record.action ~= action or not KEYS[2] and record.quota ~= ARGV[FIRST] then
    return -string.match(record.keys, '^%d+')
  end
  quota = 0
  local reply = {}
  for _, key in ipairs(keys) do
    hash = key.hash
    reply[#reply + 1] = 0
    reply[#reply + 1] = 0
    reply[#reply + 1] = now
    for _, l in ipairs(key.limits) do
      one[1] = l
      decide(one)
      act(one, -1, reply, false)
    end
  end
  reply[#reply + 1] = record.status == 'open' and 1 or 2
  return reply
end

local allowed = true
for _, key in ipairs(keys) do
  key.verdict = 0
  for _, l in ipairs(key.limits) do
    one[1], quota = l, tonumber(ARGV[l.more + 2])
    local own, set_by = decide(one, key.ban)
    if key.verdict <= 0 and own ~= 0 then
      key.verdict, key.by = own, set_by
    end
  end
  allowed = allowed and key.verdict == 0
end
hash = last.hash
if allowed and not last.old then
  local fields = call('HLEN', hash)
  local n, slack = fields % EACH == 0 and SOUGHT or 0, SLACK
  if fields >= MOST_RECORDS then
    n, slack = SEARCHED, 0
  end
  --@ delete_ended
  -- There is no number of records, which could be wrong. If many fields are of other kinds, the
  -- share of records among random fields is near enough, with a quarter for chance.
  if n == SEARCHED and #ended == 0 and fields * #found / SEARCHED >= MOST_RECORDS * 3 / 4 then
    local settled = {}
    for i, value in ipairs(records) do
      local ends = string.match(value, '^(%d+) %d+ settled')
      if ends then
        settled[#settled + 1] = {ends = ends + 0, field = found[i]}
      end
    end
    table.sort(settled, function(a, b) return a.ends < b.ends end)
    for i = 1, math.min(#settled, FORGOTTEN) do
      call('HDEL', hash, settled[i].field)
    end
    if #settled == 0 then
      local names, count = call('HRANDFIELD', hash, 512), 0
      for _, name in ipairs(names) do
        count = count + (string.sub(name, 1, 9) == 'reserved:' and 1 or 0)
      end
      if fields * count / #names >= MOST_RECORDS * 3 / 4 then
        call('HDEL', hash, '')
        return 0
      end
    end
  end
end

-- Acts on a key's limits, and queues its writes. Returns the lines of the record about them.
local function act_on(key, reply)
  local brought, setter, lines, begin, born = 0, nil, '', #reply, key.born
  local verdict = key.verdict == 0 and not allowed and -1 or key.verdict
  hash, set, gone, longest = key.hash, {}, {}, 0
  reply[begin + 1], reply[begin + 2], reply[begin + 3] = key.verdict, 0, now
  key.charged = verdict == 0 and #key.limits > 0 and key.quota or 0
  if key.charged > 0 and not born then
    born = string.format('%.0f', real)
    put('born', born, 0)
    set.records = 1
  end
  for _, l in ipairs(key.limits) do
    one[1], quota = l, tonumber(ARGV[l.more + 2])
    if l.take_own then
      l.take, l.hold = l.take_own, l.held and hold
    end
    local length = act(one, verdict, reply, false)
    if length > brought then
      brought, setter = length, l
    end
    if key.charged > 0 and l.allowed then
      --@ place_of
      --@ life_of
      lines = lines ..
        string.format('\n%s %s %s %.0f %.0f %s', l.tag, ARGV[l.more], ARGV[l.more + 1], quota, place, life)
    end
    if l.changed then
      l:save()
    end
  end
  if brought > 0 then
    put_ban(brought, setter)
  end
  reply[begin + 2] = brought
  key.set, key.gone, key.longest = set, gone, longest
  return string.format('\n%.0f %s', key.charged, key.named) .. lines
end

local reply, rules, charges = {}, {}, ''
for _, key in ipairs(keys) do
  charges = charges .. act_on(key, reply)
  if key.verdict > 0 then
    rules[#rules + 1] = (key.by or '') .. '\n'
  end
end
if allowed then
  put_record(field,
    {ends = now + hold, hold = hold, status = 'open', quota = string.format('%.0f', last.charged),
    action = action, keys = ARGV[5], at = now, charges = charges})
  set.records, last.longest = (set.records or 0) + (last.old and 0 or 1), longest
end
for _, key in ipairs(keys) do
  hash, set, gone, longest, expiry = key.hash, key.set, key.gone, key.longest, key.expiry
  write()
end
reply[#reply + 1] = 0
if #rules > 0 then
  reply[#reply + 1] = table.concat(rules)
end
return reply
