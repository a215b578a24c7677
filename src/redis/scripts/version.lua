-- Returns 1 for Valkey or 0 for Redis, and the server's version, with a byte each
-- for the major, minor and patch number. Redis before 7 does not tell its version.

local valkey = rawget(_G, 'server')
if valkey and valkey.VALKEY_VERSION_NUM then
  return {1, valkey.VALKEY_VERSION_NUM}
end
return {0, redis.REDIS_VERSION_NUM or 0}
