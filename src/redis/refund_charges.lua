-- Takes charges of one key back, as far as they have not leaked since; see
-- rl_refund_charge in algorithm.c. ARGV[2] and ARGV[3] are not used. Each charge is a
-- limit's ten arguments and four more: the amount, of a throttle in
-- microseconds and the nanoseconds that are left, the time of the charge, and
-- its mark.

local CHARGE = 4
local limits = load_limits(CHARGE)
for _, l in ipairs(limits) do
  -- Charges to the same limit change the same state, each by its own numbers.
  local state = l.state
  state.refill = l.refill
  if (state.charged or state.used) > 0 then
    local amount, rest, at, mark = unpack(ARGV, l.more, l.more + CHARGE - 1)
    state:refund_charge(tonumber(at), tonumber(mark), tonumber(amount), tonumber(rest))
    state.changed = true
  end
end
for _, l in ipairs(limits) do
  if l.changed then
    l:save()
  end
end
write()
return 1
