-- The time; this is put in front of every script.
--
-- KEYS[1] is a key's hash. ARGV[1] is the time in microseconds, or empty for
-- Redis's own clock. Numbers stay below 2^53; they become text by %.0f.

local hash = KEYS[1]
local now = tonumber(ARGV[1])
local least_ttl = 0
-- For a hash that somebody has deprived of its expiry: in a hundred years, in
-- milliseconds, every field of it has become of no use.
local lost_ttl = '3155760000000'
if now then
  -- Time that a test sets does not pass while it runs: keep all for an hour.
  least_ttl = 3600000
else
  local clock = redis.call('TIME')
  now = clock[1] * 1000000 + clock[2]
end
