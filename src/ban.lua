-- Bans the key for ARGV[3] microseconds. ARGV[2] is not used.

put('ban', text(now + quota), quota)
write()
return 1
