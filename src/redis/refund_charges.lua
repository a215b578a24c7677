-- Refunds charges of one key, less the quota that has been replenished since, as
-- rl_refund_charge in algorithm.c does. ARGV[2] is not used. Limits that count
-- refused quota then count ARGV[3] as refused, unless it is 0 or the key is banned.
-- Each charge has the LIMIT arguments of its limit and
-- CHARGE more: the amount in two parts (throttle: microseconds and nanoseconds;
-- others: units and 0), the time of the charge, and its mark (see RlCharge in
-- algorithm.h).

local CHARGE = 4
local limits, ban = load_limits(CHARGE)
for _, l in ipairs(limits) do
  -- Charges to limits with one tag change one state, each with its own refill.
  local state = l.state
  state.refill = l.refill
  if (state.charged or state.used) > 0 then
    local amount, rest, at, mark = unpack(ARGV, l.more, l.more + CHARGE - 1)
    state:refund_charge(tonumber(at), tonumber(mark), tonumber(amount), tonumber(rest))
    state.changed = true
  end
end
if quota > 0 and not (ban and tonumber(ban) > now) then
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
return 1
