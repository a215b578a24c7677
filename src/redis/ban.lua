-- Bans the key for ARGV[3] microseconds. ARGV[2] is not used.

put('ban', string.format('%.0f', now + quota), quota)
write()
return 1
