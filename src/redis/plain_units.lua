-- A part of plain.lua: one limit of an algorithm that counts units. "reply" gets the
-- four numbers that act.lua describes.

--< units
--@ numbers
period = period + 0
--@ load
if used + quota <= capacity then
  --@ take
  --@ text
  local needed = used
  --@ reset
  written, lives = text, free
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = 1, used, 0, free
end
-->
