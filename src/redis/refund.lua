-- Refunds the quota at each limit, or as much of it as is charged there. If the key
-- does not exist, this writes nothing. ARGV[2] is not used.

for _, l in ipairs((load_limits(0))) do
  if (l.charged or l.used) > 0 then
    l:refund()
    l:save()
  end
end
write()
return 1
