-- Returns the masters of a Cluster as one string: for each "<port> <port for TLS, or 0>
-- <bytes>:<host>". Outside of a Cluster it is empty. ARGV[1] is the name of a hash that does
-- not exist.

local SLOTS = 16384

-- Makes a table of a list of names and values.
local function map(list)
  local result = {}
  for i = 1, #list, 2 do
    result[list[i]] = list[i + 1]
  end
  return result
end

local shards = redis.pcall('CLUSTER', 'SHARDS')
if shards.err then
  if not string.find(shards.err, 'cluster support disabled', 1, true) then
    return shards
  end
  -- A replica refuses to delete, so its old data is never read.
  redis.call('HDEL', ARGV[1], '')
  return ''
end

local out, covered, lost = {}, 0, {}
local function add(node)
  local host = node.endpoint or ''
  out[#out + 1] = string.format('%.0f %.0f %.0f:', node.port or 0, node['tls-port'] or 0, #host)
  out[#out + 1] = host
end

for _, list in ipairs(shards) do
  local shard, online = map(list), false
  for _, fields in ipairs(shard.nodes) do
    local node = map(fields)
    if node.role == 'master' and node.health == 'online' then
      online = true
      add(node)
    elseif node.role == 'master' then
      lost[#lost + 1] = node
    end
  end
  for i = 1, online and #shard.slots or 0, 2 do
    covered = covered + shard.slots[i + 1] - shard.slots[i] + 1
  end
end
-- If the others have all slots, a lost master has no key. Otherwise the caller must
-- ask it, and fails. (Redis 8 does not tell which slots a lost master has.)
if covered < SLOTS then
  for _, node in ipairs(lost) do
    add(node)
  end
end
return table.concat(out)
