-- Forgets of the key the fields from ARGV[2] on and the logs from KEYS[2] on,
-- or if there is no ARGV[2] all of it. Returns how many things that were.

if #ARGV > 1 then
  local n = redis.call('HDEL', hash, unpack(ARGV, 2))
  for i = 2, #KEYS do
    n = n + redis.call('DEL', KEYS[i])
  end
  return n
end

-- A log's field names its key: "sliding_log:<period>" that of "<hash>:log:<period>".
local keys = {hash}
for _, field in ipairs(redis.call('HKEYS', hash)) do
  local period = string.match(field, '^sliding_log:(%d+)$')
  if period then
    keys[#keys + 1] = hash .. ':log:' .. period
  end
end
return redis.call('DEL', unpack(keys))
