-- A part of settle.lua: a settlement without functions. There is one key, and no state was reset.
-- Other calls go on behind it. An algorithm has the part "settled" for what it can settle so: it sets "was"
-- to the units in use before (0: none), and "written" and "lives" to the new value of the field and how long
-- it is needed, unless the field is to be deleted.

--< settle_simple
do
  local ends, hold, of, action, at, named, charges =
    string.match(kept[1] or '', '^(%d+) (%d+) open (%d+) (%x+) 1 (%d+)\n%d+ (%x+)(.*)$')
  if ends and ends + 0 > now and not KEYS[2] and ARGV[5] ~= '' then
    local MOST, born, settled, simple, names, charge = 1e15, kept[2], ARGV[5] + 0, true, {}, {}
    for tag, first, second, units, place, life in
      string.gmatch(charges, '\n(%S+) (%d+) (%d+) (%d+) (%d+) (%d+)') do
      local algorithm, period = string.match(tag, '^([%l_]+):(%d*)')
      local changes = settled ~= units + 0
      --@ changes of each
      if changes then
        simple = simple and life == born
        names[#names + 1] = tag
        charge[#names] = {algorithm, tonumber(period), first + 0, second + 0, settled - units, place + 0}
      end
    end
    if simple then
      local values, expiry, set, gone = #names > 0 and call('HMGET', hash, unpack(names)), kept[3], {}, {}
      local needed = math.min(hold, 3600000000)
      for i = 1, #names do
        local algorithm, period, first, second, more, place = unpack(charge[i], 1, 6)
        local units, value, was, written, lives = math.abs(more), values[i]
        --@ settled of each
        if not was then
          simple = false
          break
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
          string.format('%.0f %s settled:%s %s %s 1 %s', now + math.min(hold, 3600000000), hold, ARGV[5], of,
            action, at)
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
