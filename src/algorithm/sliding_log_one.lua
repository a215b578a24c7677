-- sliding_log: the script for one limit without options. See redis/one.lua for the
-- arguments and the reply. If the log is more than a tail, or refusals count, the
-- script goes on as for a list of limits (check.lua), and its reply is the reply of
-- that script.

local tag, quota, period, capacity = ARGV[1], ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0
local state = call('HMGET', hash, tag, 'ban', 'expiry', tag .. ':denied')
local value, ban, expiry, denied = state[1], state[2], state[3], state[4]
--@ is_tail
if is_tail then
