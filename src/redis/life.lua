-- Parts of the scripts that charge what may be refunded later, and that refund it. They find out
-- whether a state is still the one that was charged: after a reset, or if the key was deleted or lost,
-- a refund would give back what others have taken since.
--
-- The life of a state is the number in the field "reset:<tag>" if rl_reset has reset it, otherwise
-- that in "born": Redis's own time of the key's first charge that may be refunded. "born" ends
-- with " r" if there are fields of resets. Lives are compared for equality, because a clock can go
-- back.

-- Sets "reset" to the number that the last reset of the limit l has written, or to nil if there is
-- none, or it has ended.
--< reset_of(l) -> reset
local reset, until_then = string.match(call('HMGET', hash, 'reset:' .. l.tag)[1] or '', '^(%d+) (%d+)$')
reset = until_then and until_then + 0 > now and reset or nil
-->

-- Sets "life" to that of the limit l. "born" is the field, or false.
--< life_of(l, born) -> life
local life = born or '0'
if string.sub(life, -1) == 'r' then
  --@ reset_of
  life = reset or string.sub(life, 1, -3)
end
-->

-- The error reply to a call that comes after its refund. Nobody waits for it.
--< late() -> LATE
local LATE = 'ERR the call has come after its refund'
-->

-- Sets "place" to that of the charge which the limit l has just taken, as in RlCharge.
--< place_of(l) -> place
local algorithm, place = l.algorithm, 0
--@ place of each
-->

-- Queues the field "mark:<mark>" of a call that has charged: until when a unit of its concurrent
-- limits is held, the time, and for each limit the place of its charge and its life, "unit" if it is
-- concurrent, or "- 0" if it was not charged. It needs the lives at the end of the reply. A refund of a unit
-- changes or deletes this field, so it refunds once, also if it is sent again, or there was no reply to the
-- call.
--< put_mark(limits, charged, quota, mark, reply, set, put)
if charged and quota > 0 then
  local text, keep = '', 0
  for i, l in ipairs(limits) do
    if not l.allowed then
      text = text .. ' - 0'
    elseif l.held then
      text, keep = text .. string.format(' %.0f unit', l.newest), math.max(keep, l.period)
    else
      --@ place_of
      text = text .. string.format(' %.0f %.0f', place, reply[#reply - #limits + i])
    end
  end
  put('mark:' .. mark, string.format('%.0f %.0f', now + keep, now) .. text, keep)
  set.records = 1
end
-->

-- Appends to the reply the life of each of the limits' states, or zeros if the action was not charged.
--< append_lives(limits, charged, quota, born, reply, put) -> born
if charged and quota > 0 and not born then
  born = string.format('%.0f', real)
  put('born', born, 0)
end
for _, l in ipairs(limits) do
  --@ life_of
  reply[#reply + 1] = charged and quota > 0 and life + 0 or 0
end
-->
