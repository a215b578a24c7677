-- The time. All scripts but masters.lua and version.lua begin with it, or with the clock of
-- single.lua.
--
-- KEYS[1] is the key's hash, or absent in bans.lua. ARGV[1] is the time in microseconds, or empty for
-- Redis's own clock. Numbers stay below 2^53; %.0f makes them text, or %d of parts below 2^31.

local hash, call, given = KEYS[1], redis.call, ARGV[1]
--< time(given) -> real, now, least
local clock = call('TIME')
-- Redis's own time, by which it deletes keys, and the time that decides.
local real = clock[1] * 1000000 + clock[2]
local now, least = real, 0
if given and given ~= '' then
  -- A time that a test sets does not pass: keep everything for an hour.
  now, least = tonumber(given), 3600000000
end
-->
