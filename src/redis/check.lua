-- Charges the quota to all limits or to none. ARGV[2] is 1, or 0 to decide only
-- and change nothing, also if the quota is 0.
--
-- Returns the verdict (0: allowed, -1: refused, else the rest of a ban in microseconds), the
-- length of the ban that this refusal starts (0: none), the time, the numbers of each limit
-- (see act.lua), and under a ban the limit that set it, if it is known.

--< list_call
local simple, names, begin, stride, at = ARGV[2] == '1', {'ban', 'expiry'}, 4, 10, 3
-->

--< list_name
if ARGV[a] == 'sliding_log' then
  names[#names + 1] = ARGV[a + 1] .. ':denied'
end
-->

--< list_charge list_end
-- A check keeps no record of the charge.
-->

--< check
local COMMIT = ARGV[2] == '1'

if not COMMIT then
  -- No hash has this field. A replica refuses to delete, so its old data is never read.
  redis.call('HDEL', hash, '')
end

local limits, ban = load_limits(0)
local verdict, by = decide(limits, ban)
local reply = {verdict, 0, now}
reply[2] = act(limits, verdict, reply, COMMIT)
if COMMIT then
  write()
end
reply[#reply + 1] = by
return reply
-->
