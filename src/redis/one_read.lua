-- The script for one limit without options, of an algorithm that counts units: reads
-- the arguments and the state. See one.lua.

local tag, quota, period = ARGV[1], ARGV[2] + 0, ARGV[3] + 0
local first, second = ARGV[4], ARGV[5]
--@ numbers
local state = call('HMGET', hash, tag, 'ban', 'expiry')
local value, ban, expiry = state[1], state[2], state[3]
