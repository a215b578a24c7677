-- Parts of the scripts that write: the expiry of a hash. It is late enough for all
-- fields. The field "expiry" has it too, in milliseconds of Redis's own clock. Most
-- calls need a hash until an earlier time, and leave the expiry as it is. Otherwise
-- it is set later than is needed, so that the next calls leave it.
--
-- The hash's own expiry is read too, because another program may have changed it.
-- If it is earlier than the field says, or there is none, the field's is set again.
-- A hash without the field may have fields of any age: if it has no expiry either, it
-- gets a hundred years, which is long enough for each of them.

-- Sets "expires" to the new expiry, or to nil if it stays. The hash is needed for
-- "needed" microseconds.
--< expiry
if needed < least then
  needed = least
end
local ends = (real + needed) / 1000 + 1
local kept, found, expires = (expiry or 0) + 0, call('PEXPIRETIME', hash)
if ends > kept or found < kept then
  if found == -1 and not expiry then
    kept = real / 1000 + 3155760000000
  elseif ends > kept then
    kept = ends + math.min(math.max(needed / 4000, 1000), 3600000)
  end
  expires = string.format('%.0f', math.max(kept, found))
end
-->

-- Writes "text" to the field "tag".
--< keep
if expires then
  call('HSET', hash, tag, text, 'expiry', expires)
  call('PEXPIREAT', hash, expires)
else
  call('HSET', hash, tag, text)
end
-->

-- Writes the fields and values of "set".
--< keep_all
if expires then
  set[#set + 1] = 'expiry'
  set[#set + 1] = expires
end
call('HSET', hash, unpack(set))
if expires then
  call('PEXPIREAT', hash, expires)
end
-->
