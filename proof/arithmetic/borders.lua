-- Runs the scripts for Redis on the actions of "borders cases", with a Redis that has one field,
-- and prints the reply, and the field after the action and after a refund.
--
-- In one action of 50, it looks at each value in each register after each instruction, also at
-- those that no variable has: a number must be below 2^53, so that it is exact. Only where a bucket
-- lacks 10^15 units, of a limit with other numbers, the product with the period may be larger:
-- a hundred years are less.
--
-- Arguments: single_throttle.lua, single_token_bucket.lua, refund_charges.lua, as Redis gets them.

local scripts = {throttle = assert(loadfile(arg[1])), token_bucket = assert(loadfile(arg[2])), refund = assert(loadfile(arg[3]))}
local line_number, largest, field, expiry, written, clock = 0, 0

local function check_registers()
  local i = 1
  while true do
    local name, value = debug.getlocal(2, i)
    if not name then
      return
    end
    if type(value) == 'number' then
      if not (value > -2^53 and value < 2^53) then
        io.stderr:write(string.format('action %d: %.0f in %s, line %d\n', line_number, value, name, debug.getinfo(2, 'l').currentline))
        os.exit(1)
      end
      largest = math.max(largest, math.abs(value))
    end
    i = i + 1
  end
end

local commands = {
  TIME = function() return clock end,
  HMGET = function(...)
    local values = {}
    for i, name in ipairs({...}) do
      values[i] = name == 't' and field or name == 'expiry' and expiry or false
    end
    return values
  end,
  HSET = function(...)
    local set = {...}
    for i = 1, #set, 2 do
      written = set[i] == 't' and set[i + 1] or written
    end
    return 0
  end,
  -- Adds whole microseconds, as Redis does with 64 bits.
  HINCRBY = function(_, more)
    written = string.format('%.0f', string.sub(field, 1, -4) + string.sub(more, 1, -4)) .. string.sub(field, -3)
  end,
  HDEL = function(name) written = name == 't' and 'gone' or written end,
  HLEN = function() return 1 end,
  PEXPIRETIME = function() return expiry and tonumber(expiry) or -2 end,
  PEXPIREAT = function() end
}

redis = {call = function(command, _, ...) return commands[command](...) end}
redis.pcall = redis.call

local function run(script, looks, ...)
  KEYS, ARGV, written = {'key'}, {...}, nil
  if looks then
    debug.sethook(check_registers, '', 1)
  end
  local reply = script()
  debug.sethook()
  return reply, (string.gsub(written or '-', ' ', '_'))
end

for line in io.lines() do
  local name, now, quota, period, n1, n2, n3, n4, value = string.match(line, '^(%S+) (%d+) (%d+) (%d+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
  line_number = line_number + 1
  local looks, reply, after, refunded = line_number % 50 == 0 and not string.find(value, '_1000000000000000', 1, true)
  field = value ~= '-' and string.gsub(value, '_', ' ')
  -- In turn, the expiry of the hash is late enough, so that HINCRBY adds to a TAT; or the hash has none.
  expiry = line_number % 2 == 0 and '8000000000000'
  -- Redis has the time, or a test sets it.
  local given = line_number % 3 == 0 and now or nil
  clock = {string.format('%.0f', math.floor(now / 1000000)), string.format('%.0f', now % 1000000)}
  if name == 'throttle' then
    reply, after = run(scripts.throttle, looks, 't', n1, n2, n3, n4, given)
  else
    reply, after = run(scripts.token_bucket, looks, 't', quota, period, n1, n2, given)
  end
  _, refunded = run(scripts.refund, looks, given or '', '0', '1', name, 't', period, n1, n2, n3, n4, '', '0', '0',
    name == 'throttle' and n1 or quota, name == 'throttle' and n3 or '0', '-2', '0', '0', '')
  if type(reply) ~= 'table' then
    reply = {reply}
  end
  local texts = {}
  for i, number in ipairs(reply) do
    texts[i] = type(number) == 'number' and string.format('%.0f', number) or number
  end
  print(#texts, table.concat(texts, ' '), after, refunded)
end
io.stderr:write(string.format('the largest number is %.0f, below 2^53 by %.0f\n', largest, 2^53 - largest))
