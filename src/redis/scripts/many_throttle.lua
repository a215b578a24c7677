-- Decides many keys under one limit each, in the order of KEYS. ARGV[2] is the number of
-- arguments of a limit: those of throttle.lua, without those at the end that are 0 for all.
-- From ARGV[3] on there are runs: a number of keys, and the arguments of their limit.
--
-- Returns the time, and the number of each key. Behind them there are pairs for keys that are
-- banned: the key's position, and the rest of its ban in microseconds; or that have failed: -1.
-- Such a key was not charged, and its number is 0. A text follows as of check_many.lua.
--@ clock

-- Returns the numbers of one key.
local function take(hash, tag, cost, room, cost_ns, room_ns)
  --@ throttle
end

local size, at, left = tonumber(ARGV[2]), 3, 0
local tag, cost, room, cost_ns, room_ns
local reply, pairs_at_end, rules, i = {now}, {}, {}, 0

local function add_pair(value)
  pairs_at_end[#pairs_at_end + 1] = i
  pairs_at_end[#pairs_at_end + 1] = value
end

local function take_keys()
  while i < #KEYS do
    i = i + 1
    if left == 0 then
      left = tonumber(ARGV[at])
      tag, cost, room, cost_ns, room_ns = unpack(ARGV, at + 1, at + size)
      at = at + 1 + size
    end
    left = left - 1
    local number = take(KEYS[i], tag, cost, room, cost_ns, room_ns)
    if type(number) == 'table' then
      add_pair(number[1])
      rules[#rules + 1] = (number[3] or '') .. '\n'
      number = number[2]
    end
    reply[i + 1] = number
  end
end

-- An error in one key must not hide the answers of the others.
while i < #KEYS do
  if not pcall(take_keys) then
    reply[i + 1] = 0
    add_pair(-1)
  end
end
for _, value in ipairs(pairs_at_end) do
  reply[#reply + 1] = value
end
if #rules > 0 then
  reply[#reply + 1] = table.concat(rules)
end
return reply
