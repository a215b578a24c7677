-- Returns the states of the key, and its ban, as one string. It begins with "<bytes>:<state>":
-- the state after which the next call goes on, its ARGV[2] (empty at first), or "0:" if this
-- was the last. Then, in the order of their names, it has for each state "<used> <end>
-- <bytes>:<state><bytes>:<raw>", with "-" for a figure that is not known. A state that is as if
-- it had never been used is left out.
--
-- A state's name is its tag, or "ban", or "ban:level", or "<tag>:refused" for the refusals that a
-- ban counts. Of the chunks of logs, only where a log begins is read. A call looks at MOST_RECORDS
-- reservations at most, because sorting takes long. For MOST_FIELDS fields and MOST_STATES states
-- Redis needs a few milliseconds.
--@ clock state algorithms

local match = string.match
local MOST_FIELDS, MOST_STATES, MOST_RECORDS, LONGEST, LONGEST_RAW = 4096, 256, 256, 30000, 256
-- To read a log's chunk takes as long as this number of bytes.
local CHUNK_READ = 2000

-- Returns a limit with this state tag, or nil if it is no tag. The refill is not known.
local function limit_of(tag)
  local plain = string.gsub(tag, ':shadow$', '')
  local algorithm, rest = match(plain, '^([%l_]+):(.*)$')
  local limit
  --@ limit of each
  if limit then
    limit.tag, limit.period = tag, tonumber(match(rest, '^%d+'))
  end
  return limit and setmetatable(limit, algorithms[algorithm])
end

local function is_record(state)
  return string.sub(state, 1, 9) == 'reserved:'
end

-- Returns the units in use, the end, and the value of a state, and for how many bytes more it counts.
local function describe(state)
  local refused = match(state, '^(.*):refused$')
  local values = redis.call('HMGET', hash, state, state .. ':denied')
  local value = values[1] or values[2]
  if is_record(state) then
    local ends, status, of, n = match(value, '^(%d+) %d+ (%l+:?%d*) (%d+) %x+ (%d)')
    return tonumber(of), tonumber(ends), n == '1' and status or status .. ' keys:' .. n
  elseif state == 'ban' or state == 'ban:level' then
    return nil, tonumber(match(value, '^%d+') or 0), value
  elseif refused then
    local l = limit_of(refused)
    local start, ends, count = refusals(l, value)
    return count, not l.calendar and start - l.period > now and now or ends, value
  end
  local l = limit_of(state)
  l:load(values[1], values[2])
  if l.used == 0 then
    return 0, now, value
  end
  local algorithm, used, ends = l.algorithm, l.used, l.reset and now + l:reset()
  --@ shown of each
  return used, ends, value, l.log and l.log.next and CHUNK_READ
end

local function too_many(what, most)
  return redis.error_reply(string.format('ERR the key has more than %.0f %s, which is too many for rl_inspect',
    most, what))
end

-- No hash has this field. A replica refuses to delete, so its old data is never read.
redis.call('HDEL', hash, '')
if redis.call('HLEN', hash) > MOST_FIELDS then
  return too_many('fields', MOST_FIELDS)
end
local states, records, known = {}, {}, {}
for _, field in ipairs(redis.call('HKEYS', hash)) do
  if is_record(field) then
    if field > ARGV[2] then
      records[#records + 1] = field
    end
  else
    local algorithm, state = match(field, '^[%l_]+'), field
    --@ state_of of each
    -- Skip chunks and indexes of logs, which are most fields of a long log.
    if state == field then
      state = match(field, '^(.*):denied$') or field
      if not known[state] and
        (state == 'ban' or state == 'ban:level' or limit_of(match(state, '^(.*):refused$') or state)) then
        known[state] = true
        states[#states + 1] = state
        if #states > MOST_STATES then
          return too_many('states', MOST_STATES)
        end
      end
    end
  end
end

-- About the first MOST_RECORDS records in the order of names, up to "upto" if there are others. Redis hashes
-- the fields by a secret, so no caller chooses the sample.
local upto
while #records > MOST_RECORDS do
  local sample, first = {unpack(records, 1, 64)}, {}
  table.sort(sample)
  upto = sample[math.max(math.floor(64 * MOST_RECORDS / #records), 1)]
  for _, record in ipairs(records) do
    if record <= upto then
      first[#first + 1] = record
    end
  end
  records = first
end
for _, record in ipairs(records) do
  states[#states + 1] = record
end
table.sort(states)

local out, size, last, more = {}, 0, '', ''
for _, state in ipairs(states) do
  if upto and state > upto then
    break
  elseif state > ARGV[2] then
    local used, ends, value, more_bytes = describe(state)
    size = size + (more_bytes or 0)
    if not ends or ends > now then
      local raw = string.sub(value, 1, LONGEST_RAW)
      local row = (used and string.format('%.0f', used) or '-') .. ' ' ..
        (ends and string.format('%.0f', ends) or '-') ..
        string.format(' %.0f:', #state) .. state .. string.format('%.0f:', #raw) .. raw
      if size + #row > LONGEST then
        more, upto = last, nil
        break
      end
      out[#out + 1], size = row, size + #row
    end
    last = state
  end
end
more = upto or more
return string.format('%.0f:', #more) .. more .. table.concat(out)
