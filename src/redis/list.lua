-- A list of limits without options that allows the action: a part of check.lua and reserve.lua,
-- with their arguments and replies. It makes no functions, and no table for a limit. Other calls
-- go on behind it. Those files have the parts list_call, list_charge and list_end, and algorithms the
-- part "listed": if the limit allows the action, it sets "written" to the new value of the field, and
-- "lives" to how long that is needed.

-- One limit of an algorithm that counts units. "reply" gets the four numbers that act.lua
-- describes.
--< units
--@ numbers
period = period + 0
--@ load
if used + quota <= capacity then
  --@ take
  --@ text
  local needed = used
  --@ reset
  --@ lives
  written = text
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = 1, used, 0, free
end
-->

--< list
do
  --@ list_call
  if simple then
    local ARGV, quota = ARGV, ARGV[of] + 0
    for a = begin, #ARGV, stride do
      -- No count_denied, no ban.
      simple = simple and ARGV[a + 7] == '' and ARGV[a + 8] == '0'
      local algorithm = ARGV[a]
      names[#names + 1] = ARGV[a + 1]
      --@ list_name of each
    end
    local values = simple and call('HMGET', hash, unpack(names))
    if simple and not (values[1] and string.match(values[1], '^%d+') + 0 > now) then
      local expiry, set, reply, needed, at = values[2], {}, {0, 0, now}, 0, at
      for a = begin, #ARGV, stride do
        local algorithm, period, first, second = ARGV[a], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
        local name, value, written, lives = names[at], values[at]
        at = at + 1
        --@ listed of each
        if not written then
          simple = false
          break
        end
        set[#set + 1] = name
        set[#set + 1] = written
        --@ list_charge
        if lives > needed then
          needed = lives
        end
      end
      --@ list_end
      if simple then
        --@ expiry
        --@ keep_all
        return reply
      end
    end
  end
end
-->
