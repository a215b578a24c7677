-- Several limits at once: takes quota from all of them, or from none.
--
-- For each limit ARGV has what throttle.lua takes from ARGV[2] on. Returns
-- the verdict (0: allowed, -1: refused, or what is left of a ban in
-- microseconds), then each limit's backlog before the action in nanoseconds.

local fields = {'ban'}
for i = 2, #ARGV, 5 do
  fields[#fields + 1] = ARGV[i]
end
local state = redis.call('HMGET', hash, unpack(fields))

local us, ns = {}, {}
local verdict = 0
for l = 1, #fields - 1 do
  local a = 5 * l - 3
  local room = tonumber(ARGV[a + 3])
  us[l], ns[l] = backlog(state[l + 1])
  if us[l] > room or us[l] == room and ns[l] > tonumber(ARGV[a + 4]) then
    verdict = -1
  end
end
local ban = state[1] and tonumber(state[1]) - now or 0
if ban > 0 then
  verdict = ban
end

local reply = {string.format('%.0f', verdict)}
for l = 1, #fields - 1 do
  local a = 5 * l - 3
  local cost_us, cost_ns = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
  if verdict == 0 and (cost_us > 0 or cost_ns > 0) then
    put(ARGV[a], us[l] + cost_us, ns[l] + cost_ns)
  end
  reply[l + 1] = string.format('%.0f%03.0f', us[l], ns[l])
end
return reply
