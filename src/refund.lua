-- Gives quota back to throttle limits, never above full.
--
-- For each limit ARGV has the field of its TAT and the cost of the quota in
-- microseconds and nanoseconds. An absent key stays absent.

for i = 2, #ARGV, 3 do
  local tat = redis.call('HGET', hash, ARGV[i])
  if tat then
    local us, ns = backlog(tat)
    put(ARGV[i], us - tonumber(ARGV[i + 1]), ns - tonumber(ARGV[i + 2]))
  end
end
return 1
