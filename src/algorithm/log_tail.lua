-- Parts of single.lua and list.lua: the charge to a log that is only a tail (see log.lua),
-- with at least one free place.

--< numbers(first) -> capacity
local capacity = tonumber(first)
-->

--< is_tail(value, denied) -> is_tail
local is_tail = not denied and
  (not value or #value < 64 * 22 and not string.find(value, ' ', string.find(value, ' ', 1, true) + 1, true))
-->

--< load(value, period) -> used, newest, from, records
local used, newest, from, records = 0, 0, 1, value or ''
if value then
  local gone, last = now - period, string.sub(records, -22, -7) + 0
  if last > gone then
    from = string.find(records, ' ', 1, true) + 1
    used, newest = string.sub(records, 1, from - 2) + 0, last
    while string.sub(records, from, from + 15) + 0 <= gone do
      used, from = used - string.sub(records, from + 16, from + 21), from + 22
    end
  else
    from = #records + 1
  end
end
-->

-- Times never decrease, even if the clock does.
--< take(used, newest, records, quota) -> used, newest, records, units
local units = quota
if used == 0 or now > newest then
  newest = now
elseif string.byte(records, -6) ~= 43 then
  -- No reservation has the newest entry for itself.
  units, records = quota + string.sub(records, -6), string.sub(records, 1, -23)
end
used = used + quota
-->

--< text(used, newest, from, records, units) -> text
local text = string.format('%.0f %s%016.0f%06.0f', used, string.sub(records, from), newest, units)
-->

--< reset(newest, period) -> free
local free = newest + period - now
-->

--< lives(free) -> lives
lives = free
-->

--< wait(needed, from, records, period) -> free
while needed > string.sub(records, from + 16, from + 21) + 0 do
  needed, from = needed - string.sub(records, from + 16, from + 21), from + 22
end
local free = string.sub(records, from, from + 15) + period - now
-->
