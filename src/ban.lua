-- Bans the key for ARGV[2] microseconds.

local us = tonumber(ARGV[2])
redis.call('HSET', hash, 'ban', string.format('%.0f', now + us))
keep(us)
return 1
