-- Refunds the quota at each limit, or as much of it as is charged there. If the key
-- does not exist, this writes nothing. ARGV[2] is not used. Returns 1.
--@ clock state algorithms

call('HDEL', hash, '')
local limits = load_limits(0)
check_windows()
for _, l in ipairs(limits) do
  if (l.charged or l.used) > 0 then
    l:refund()
    l:save()
  end
end
write()
return 1
