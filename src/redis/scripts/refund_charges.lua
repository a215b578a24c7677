-- Refunds charges of 1 to 100 keys, in the order of KEYS, as rl_refund_charge in algorithm.c
-- does. From ARGV[2] on there are for each key: quota, number of charges, charges. Limits that
-- count refused quota then count the key's quota as refused, unless it is 0 or the key is
-- banned. Each charge has the LIMIT arguments of its limit and CHARGE more: the amount in two
-- parts (throttle: microseconds and nanoseconds; others: units and 0), time, mark and life as
-- in RlCharge. A charge of another life is not refunded.
--
-- Returns 1, or the positions of the keys that have failed: these are not refunded. If
-- the first key fails, none is, and the reply is its error.
--@ clock state algorithms log_refund

local CHARGE = 5
local at, i, failed = 2, 0, {}

local function refund_key()
  local from, to = at + 2, at + 1 + ARGV[at + 1] * (LIMIT + CHARGE)
  i = i + 1
  quota, at = tonumber(ARGV[at]), to + 1
  hash, set, gone, longest = KEYS[i], {}, {}, 0
  local limits, ban, lease, born = load_limits(CHARGE, from, to, 'lease', 'born')
  for _, l in ipairs(limits) do
    -- Charges to limits with one tag change one state.
    local state = l.state
    local of_life = ARGV[l.more + CHARGE - 1]
    --@ life_of
    -- An entry of a log is found by its time, in any life.
    if (state.charged or state.used) > 0 and (of_life == '0' or l.log or of_life == lease or of_life == life) then
      local amount, rest, time, mark = unpack(ARGV, l.more, l.more + CHARGE - 1)
      state:refund_charge(tonumber(time), tonumber(mark), tonumber(amount), tonumber(rest), l)
      state.changed = true
    end
  end
  if quota > 0 and not (ban and string.match(ban, '^%d+') + 0 > now) then
    for _, l in ipairs(limits) do
      if l.count_denied then
        l.state:deny()
        l.state.changed = true
      end
    end
  end
  for _, l in ipairs(limits) do
    if l.changed then
      l:save()
    end
  end
  write()
end

call('HDEL', hash, '')
refund_key()
while i < #KEYS do
  if not pcall(refund_key) then
    failed[#failed + 1] = i
  end
end
return #failed > 0 and failed or 1
