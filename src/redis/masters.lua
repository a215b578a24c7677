-- Returns the masters of a Cluster as one string: for each its port, its port for
-- TLS (0: none) and its host, "<port> <port> <bytes>:<host>". If the server is no
-- Cluster's, the string is empty. No key, no arguments.

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
  return string.find(shards.err, 'cluster support disabled', 1, true) and '' or shards
end

local out = {}
local function add(node)
  local host = node.endpoint or ''
  out[#out + 1] = string.format('%.0f %.0f %.0f:', node.port or 0, node['tls-port'] or 0, #host)
  out[#out + 1] = host
end

for _, list in ipairs(shards) do
  local shard, online, lost = map(list), 0, nil
  for _, fields in ipairs(shard.nodes) do
    local node = map(fields)
    if node.role == 'master' and node.health == 'online' then
      online = online + 1
      add(node)
    elseif node.role == 'master' then
      lost = node
    end
  end
  -- A master without slots can be lost: no key is there. A master that has slots is
  -- asked although it seems to be lost, so that the call fails if it is.
  if online == 0 and lost and #shard.slots > 0 then
    add(lost)
  end
end
return table.concat(out)
