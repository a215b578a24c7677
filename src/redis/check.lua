-- Charges the quota to all limits or to none. ARGV[2] is 1, or 2 if the transaction may have to
-- refund the charge, with a mark behind it under a concurrent limit (see life.lua), or 0 to decide
-- only and change nothing, also if the quota is 0.
--
-- Returns the verdict (0: allowed, -1: refused, else the rest of a ban in microseconds), the
-- length of the ban that this refusal starts (0: none), the time, the numbers of each limit
-- (see act.lua), with ARGV[2] = 2 the life of each limit's state, and under a ban the limit that set
-- it, if it is known.

--< list_call
local simple, names, begin, stride, at, of = ARGV[2] == '1' or ARGV[2] == '2', {'ban', 'expiry'}, 4, 10, 3, 3
if ARGV[2] == '2' then
  names[3], at = 'born', 4
end
-->

--< list_charge
-- A check keeps no record of the charge.
-->

--< list_end
if ARGV[2] == '2' then
  local born = values[3]
  simple = simple and not (born and string.sub(born, -1) == 'r')
  if simple and not born then
    born = string.format('%.0f', real)
    set[#set + 1], set[#set + 2] = 'born', born
  end
  for _ = begin, simple and #ARGV or 0, stride do
    reply[#reply + 1] = born + 0
  end
end
-->

--< check
--@ late
local how, mark = string.match(ARGV[2], '^(%d) ?(%x*)$')
local COMMIT, REFUNDABLE = how ~= '0', how == '2'
mark = mark ~= '' and mark

if not COMMIT then
  -- No hash has this field. A replica refuses to delete, so its old data is never read.
  redis.call('HDEL', hash, '')
end

local limits, ban, born, late =
  load_limits(0, nil, nil, REFUNDABLE and 'born' or nil, mark and 'mark:' .. mark or nil)
if late then
  return redis.error_reply(LATE)
end
local verdict, by = decide(limits, ban)
local reply = {verdict, 0, now}
reply[2] = act(limits, verdict, reply, COMMIT)
if REFUNDABLE then
  local charged = verdict == 0
  --@ append_lives
  if mark then
    --@ put_mark
  end
end
if COMMIT then
  write()
end
reply[#reply + 1] = by
return reply
-->
