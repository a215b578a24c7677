-- The beginning of the script that decides many keys under one limit each. The next
-- file of the script, which is also a script for a single key, is the body of this
-- function. It returns the numbers of one key.
local function take(hash, tag, cost, room, cost_ns, room_ns)
