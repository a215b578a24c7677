-- The time. All scripts but masters.lua and version.lua begin with this file.
--
-- KEYS[1] is the key's hash, or absent in bans.lua. ARGV[1] is the time in microseconds, or empty for
-- Redis's own clock. Numbers stay below 2^53; %.0f makes them text.

local hash = KEYS[1]
local now = tonumber(ARGV[1])
local least_ttl = 0
-- For a hash that has lost its expiry: a hundred years in milliseconds. No
-- field is needed for longer.
local lost_ttl = '3155760000000'
if now then
  -- A time that a test sets does not pass: keep everything for an hour.
  least_ttl = 3600000
else
  local clock = redis.call('TIME')
  now = clock[1] * 1000000 + clock[2]
end
