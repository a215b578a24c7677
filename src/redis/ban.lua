-- Bans the key. ARGV[3], the quota of other scripts, is the ban's length in
-- microseconds. ARGV[2] is not used.

load_limits(0)
put('ban', string.format('%.0f', now + quota), quota)
write()
return 1
