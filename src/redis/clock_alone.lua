-- The time, for the scripts for one limit without options. See clock.lua.
--
-- Each argument costs time. So ARGV begins with the limit's arguments, without zeros at
-- the end. If a test sets the time, it is ARGV[6], and zeros fill the places before it.

local hash, call, given = KEYS[1], redis.call, ARGV[6]
--@ time
