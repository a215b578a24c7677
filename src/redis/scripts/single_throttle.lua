-- One throttle without a ban. See throttle_straight.lua.
--@ single_clock
local tag, cost, room, cost_ns, room_ns = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
--@ throttle_straight
