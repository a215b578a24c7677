-- Decides many keys, each by itself, in the order of KEYS. From ARGV[2] on there are runs: a
-- number of keys, and what they share: the number of limits (negative if the transaction may have
-- to refund them, with a mark behind it under a concurrent limit, see life.lua; then it is one key), the
-- quota, and the limits.
--
-- Returns for each key the numbers that check.lua returns, or only -2 if the key has failed,
-- also because of its windows: then it was not charged. If keys are banned, a text follows: a
-- line for each of them, with the limit that set the ban.
--@ clock state algorithms act

--@ late
local at, left, n, refundable, mark, reply, i, complete, rules = 2, 0, 0, false, '', {}, 0, 0, {}
local looked, wrote = false, false

local function take_keys()
  while i < #KEYS do
    i = i + 1
    if left == 0 then
      local minus
      minus, n, mark = string.match(ARGV[at + 1], '^(-?)(%d+) ?(%x*)$')
      left, quota, refundable, mark = tonumber(ARGV[at]), tonumber(ARGV[at + 2]), minus == '-',
        mark ~= '' and mark
      at = at + 3 + n * LIMIT
    end
    left = left - 1
    hash, set, gone, longest = KEYS[i], {}, {}, 0
    local limits, ban, born, late =
      load_limits(0, at - n * LIMIT, at - 1, refundable and 'born' or nil, mark and 'mark:' .. mark or nil)
    if late then
      error({err = LATE})
    end
    local verdict, by = decide(limits, ban)
    reply[complete + 1], reply[complete + 2], reply[complete + 3] = verdict, 0, now
    reply[complete + 2] = act(limits, verdict, reply, true)
    if refundable then
      local charged = verdict == 0
      --@ append_lives
      if mark then
        --@ put_mark
      end
    end
    write()
    looked, wrote = looked or quota == 0, wrote or #set > 0
    complete = #reply
    if verdict > 0 then
      rules[#rules + 1] = (by or '') .. '\n'
    end
  end
end

-- An error in one key must not hide the answers of the others.
while i < #KEYS do
  if not pcall(take_keys) then
    for k = #reply, complete + 1, -1 do
      reply[k] = nil
    end
    complete = complete + 1
    reply[complete] = -2
  end
end
if looked and not wrote then
  -- A replica refuses this, so it answers no quota 0. No hash has this field.
  call('HDEL', hash, '')
end
if #rules > 0 then
  reply[complete + 1] = table.concat(rules)
end
return reply
