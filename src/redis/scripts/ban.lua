-- Bans the key. ARGV[3], the quota of other scripts, is the ban's length in
-- microseconds, and ARGV[4] why it is banned, or empty. ARGV[2] is not used.
--@ clock state

load_limits(0, LIMITS + 1)
put('ban', pair_text(now + quota, now) .. (ARGV[4] ~= '' and ' ' .. ARGV[4] or ''), quota)
write()
return 1
