-- Decides many keys under one limit each, in the order of KEYS. ARGV[2] is the number of
-- arguments of a limit: those of throttle_straight.lua, without those at the end that are 0 for all.
-- From ARGV[3] on there are runs: a number of keys, and the arguments of their limit.
--
-- Returns the time, and the number of each key. FAILED is that of a key that has failed, which was
-- not charged. BANNED is ahead of a key that is banned: it has two numbers, the rest of its ban in
-- microseconds, and the backlog. A text follows as of check_many.lua.
--@ clock

-- No backlog is as long.
local FAILED, BANNED = '-9223372036854775808', '-9223372036854775807'

-- Returns the numbers of one key.
local function take(hash, tag, cost, room, cost_ns, room_ns)
  --@ throttle_straight
end

local size, at, left = tonumber(ARGV[2]), 3, 0
local tag, cost, room, cost_ns, room_ns
local reply, n, rules, i = {now}, 1, {}, 0

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
      reply[n + 1], reply[n + 2], n = BANNED, number[1], n + 2
      rules[#rules + 1] = (number[3] or '') .. '\n'
      number = number[2]
    end
    n = n + 1
    reply[n] = number
  end
end

-- An error in one key must not hide the answers of the others.
while i < #KEYS do
  if not pcall(take_keys) then
    n = n + 1
    reply[n] = FAILED
  end
end
if #rules > 0 then
  reply[n + 1] = table.concat(rules)
end
return reply
