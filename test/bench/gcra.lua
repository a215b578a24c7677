-- GCRA in the fewest commands: the script that script/bench compares calls with.
-- ARGV[1] is the interval, ARGV[2] the longest backlog, both in microseconds.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local tat = math.max(redis.call('GET', KEYS[1]) or 0, now) + ARGV[1]
if tat - now > tonumber(ARGV[2]) then
  return 0
end
redis.call('SET', KEYS[1], tat, 'PX', math.ceil((tat - now) / 1000))
return 1
