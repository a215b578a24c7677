-- Returns a part of the bans at one server, as one string: "<bytes>:<cursor>" for the
-- next part, then "<end> <bytes>:<key>" for each ban, in microseconds and with the key
-- as the name of its hash has it. The last part's cursor is 0. A ban can be in two
-- parts. No key; ARGV[2] is the cursor (0 at first), ARGV[3] the pattern of the names,
-- and ARGV[4] how many bytes are before the key in a name.
--
-- A part is a bounded number of keys and, as long as a single bucket of Redis's table
-- has no more, a bounded number of bytes, so that no part occupies Redis for long.

local COUNT, LONGEST, LONGEST_KEY = 250, 30000, 3 * 512
local cursor, pattern, prefix = ARGV[2], ARGV[3], tonumber(ARGV[4])

-- Returns the text of the bans of these hashes, or an error.
local function bans_of(names)
  local out = {}
  for _, name in ipairs(names) do
    local value = redis.pcall('HMGET', name, 'ban')
    if value.err then
      -- Other programs may have names like these.
      if not string.find(value.err, '^WRONGTYPE') then
        return nil, value
      end
    else
      local ban, key = tonumber(value[1] or nil), string.sub(name, prefix + 1, -2)
      if ban and ban > now and ban < 1e16 and #key <= LONGEST_KEY then
        out[#out + 1] = string.format('%.0f %.0f:', ban, #key)
        out[#out + 1] = key
      end
    end
  end
  return table.concat(out)
end

local text, seen, count, full = '', 0, COUNT, false
repeat
  local found = redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', count)
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
until full
return string.format('%.0f:', #cursor) .. cursor .. text
