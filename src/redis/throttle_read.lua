-- The arguments of throttle.lua, for one key.
local tag, cost, room, cost_ns, room_ns = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
