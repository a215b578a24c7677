-- A list of limits without options that allows the action: a part of check.lua and reserve.lua,
-- with their arguments and replies. It makes no functions, and no table for a limit. Other calls
-- go on behind it. Those files have the parts list_*.

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
      names[#names + 1] = ARGV[a + 1]
      --@ list_name
    end
    local values = simple and call('HMGET', hash, unpack(names))
    if simple and not (values[1] and string.match(values[1], '^%d+') + 0 > now) then
      local expiry, set, reply, needed, at = values[2], {}, {0, 0, now}, 0, at
      for a = begin, #ARGV, stride do
        local algorithm, period, first, second = ARGV[a], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
        local name, value, written, lives = names[at], values[at]
        at = at + 1
        if algorithm == 'throttle' then
          --@ backlog of throttle
          local room_us = second + 0
          if us < room_us or us == room_us and ns <= ARGV[a + 6] + 0 then
            local cost_us, cost_ns = first + 0, ARGV[a + 5] + 0
            reply[#reply + 1] = string.format('%.0f%03.0f', us, ns)
            --@ charge of throttle
            --@ tat
            written, lives = tat, us
          end
        elseif ARGV[a + 5] ~= '' then
          simple = false
        elseif algorithm == 'token_bucket' then
          --@ units of token_bucket
        elseif algorithm == 'fixed_window' then
          --@ units of fixed_window
        elseif algorithm == 'sliding_window' then
          --@ units of sliding_window
        elseif algorithm == 'sliding_log' then
          local denied = values[at]
          at = at + 1
          --@ is_tail
          if is_tail then
            --@ units of log_tail
          end
        end
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
