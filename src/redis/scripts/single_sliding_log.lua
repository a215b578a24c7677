-- One sliding_log without options. See single.lua. If the log is more than a tail, or refusals
-- count, the script goes on as for a list of limits, with the reply of check.lua.
--@ single_clock
do
  local tag, quota, period, capacity = ARGV[1], ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0
  local state = call('HMGET', hash, tag, 'ban', 'expiry', tag .. ':denied')
  local value, ban, expiry, denied = state[1], state[2], state[3], state[4]
  --@ is_tail
  if is_tail then
    --@ single_take of log_tail
  end
end

local ARGV = {'', '1', ARGV[2], 'sliding_log', ARGV[1], ARGV[3], ARGV[4], '', '', '', '', '0', '0'}
--@ state algorithms act check
