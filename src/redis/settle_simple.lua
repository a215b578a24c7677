-- Parts of settle.lua. The second is a settlement without functions: there is one key, no state was reset, and each
-- charge that changes is of throttle, token_bucket or a fixed_window without a calendar, or is a
-- refund to the newest counter of sliding_window. Other calls go on behind it.

--< cost_of_units(units, us_each, ns_each) -> cost_us, cost_ns
local rest = units % 1000 * ns_each
local cost_us, cost_ns = units * us_each + math.floor(units / 1000) * ns_each + math.floor(rest / 1000), rest % 1000
-->

--< settle_simple
do
  local ends, hold, of, action, at, named, charges = string.match(kept[1] or '', '^(%d+) (%d+) open (%d+) (%x+) 1 (%d+)\n%d+ (%x+)(.*)$')
  if ends and ends + 0 > now and not KEYS[2] and ARGV[5] ~= '' then
    local MOST, born, settled, simple, names, charge = 1e15, kept[2], ARGV[5] + 0, true, {}, {}
    for tag, first, second, units, mark, life in string.gmatch(charges, '\n(%S+) (%d+) (%d+) (%d+) (%d+) (%d+)') do
      local algorithm, period = string.match(tag, '^([%l_]+):(%d*)')
      if settled ~= units + 0 or algorithm == 'concurrent' then
        local known = algorithm == 'throttle' or algorithm == 'token_bucket' or algorithm == 'fixed_window' and period ~= '' or
          algorithm == 'sliding_window' and settled < units + 0
        simple = simple and known and life == born
        names[#names + 1] = tag
        charge[#names] = {algorithm, tonumber(period), first + 0, second + 0, settled - units, mark + 0}
      end
    end
    if simple then
      local values, expiry, set, gone = #names > 0 and call('HMGET', hash, unpack(names)), kept[3], {}, {}
      local needed = math.min(hold, 3600000000)
      for i = 1, #names do
        local algorithm, period, first, second, more, mark = unpack(charge[i])
        local units, value, was, written, lives = math.abs(more), values[i]
        if algorithm == 'throttle' then
          local us_each, ns_each = first, second
          --@ cost_of_units
          --@ backlog of throttle
          was = us + ns
          if more > 0 then
            --@ add of throttle
          else
            local less_us, less_ns = cost_us - math.max(now - at, 0), cost_ns
            if less_us >= 0 then
              --@ free of throttle
            end
          end
          if us > 0 or ns > 0 then
            --@ tat of throttle
            written, lives = tat, us
          end
        elseif algorithm == 'token_bucket' then
          local refill, amount = second, units
          --@ load of token_bucket
          was = used
          if more > 0 then
            --@ add of token_bucket
          else
            --@ free of token_bucket
          end
          -- The field of a full bucket stays, as after all refunds.
          if used > 0 or was > 0 then
            --@ text of token_bucket
            local needed = used
            --@ reset of token_bucket
            written, lives = text, free
          end
        elseif algorithm == 'sliding_window' then
          local step = second
          --@ load of sliding_window
          was = used
          if used > 0 and (k ~= mark or new <= units) then
            simple = false
            break
          elseif used > 0 then
            new, charged = new - units, charged - units
            --@ text of sliding_window
            --@ reset of sliding_window
            written, lives = text, free
          end
        else
          local from_first = second == 1
          --@ load of fixed_window
          was = used
          if more > 0 then
            --@ add of fixed_window
          elseif start == mark then
            charged = math.max(charged - units, 0)
          end
          if charged + refused > 0 then
            --@ text of fixed_window
            --@ reset of fixed_window
            --@ lives of fixed_window
            written = text
          end
        end
        if written and (more > 0 or was > 0) then
          set[#set + 1], set[#set + 2] = names[i], written
          needed = math.max(needed, lives)
        elseif was > 0 then
          gone[#gone + 1] = names[i]
        end
      end
      if simple then
        set[#set + 1], set[#set + 2] = 'reserved:' .. ARGV[2],
          string.format('%.0f %s settled:%s %s %s 1 %s', now + math.min(hold, 3600000000), hold, ARGV[5], of, action, at)
        --@ expiry
        --@ keep_all
        if #gone > 0 then
          call('HDEL', hash, unpack(gone))
        end
        return {tonumber(of), tonumber(string.sub(named, 1, 8), 16), tonumber(string.sub(named, 9), 16)}
      end
    end
  end
end
-->
