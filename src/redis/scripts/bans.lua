-- Returns a part of the bans at one server, as one string: "<bytes>:<cursor>" for the
-- next part, then "<end> <began> <bytes>:<name><bytes>:<why>" for each ban, in microseconds and
-- with the name of the key's hash, without the prefix. The last part's cursor is 0. A ban can be
-- in two parts. ARGV[2] is the cursor (0 at first), ARGV[3] the pattern of the names, and
-- ARGV[4] how many bytes the prefix has.
--
-- A beginning that is not known is "-", as is the end of a key that could not be read: in a
-- script that reads several slots of a Cluster, Redis 8 does not find the keys of a slot that
-- is moving. The caller then sends another call with its hash as KEYS[1].
--
-- A part has a bounded number of keys and bytes, so that it does not occupy Redis for
-- long. If a single bucket of Redis's table has more bytes, the script fails.
--@ clock

local COUNT, LONGEST, LONGEST_KEY, LONGEST_WHY = 250, 30000, 3 * 512 + 2, 256
local cursor, pattern, prefix = ARGV[2], ARGV[3], tonumber(ARGV[4])

-- Returns the text of the bans of these hashes; or nil and the error reply.
local function bans_of(names)
  local out = {}
  for _, name in ipairs(names) do
    local value, key = redis.pcall('HMGET', name, 'ban'), string.sub(name, prefix + 1)
    local ends, began, why = nil, '-', ''
    if not value.err then
      local ban, since, rest = string.match(value[1] or '', '^(%d+) ?(%d*) ?(.*)$')
      ends = ban and tonumber(ban) > now and #ban <= 16 and ban
      if ends then
        began, why = #since > 0 and #since <= 16 and since or '-', string.sub(rest, 1, LONGEST_WHY)
      end
    elseif string.find(value.err, 'non local key', 1, true) and not hash then
      ends = '-'
    elseif not string.find(value.err, '^WRONGTYPE') then
      -- A key of another type, with a name like these, belongs to another program.
      return nil, value
    end
    if ends and #key <= LONGEST_KEY then
      out[#out + 1] = string.format('%s %s %.0f:', ends, began, #key)
      out[#out + 1] = key
      out[#out + 1] = string.format('%.0f:', #why)
      out[#out + 1] = why
    end
  end
  return table.concat(out)
end

local text, seen, count, full = '', 0, COUNT, false
while not full do
  local found = hash and {'0', {hash}} or redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', count)
  local bans, failure = bans_of(found[2])
  if not bans then
    return failure
  end
  if #text + #bans <= LONGEST then
    text, cursor, seen = text .. bans, found[1], seen + count
    full = cursor == '0' or seen >= COUNT
  elseif text ~= '' then
    full = true
  elseif count > 1 then
    count = math.ceil(count / 8)
  else
    return redis.error_reply('ERR too many bans in one bucket of the table of keys')
  end
end
return string.format('%.0f:', #cursor) .. cursor .. text
