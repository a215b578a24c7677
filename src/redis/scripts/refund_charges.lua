-- Refunds charges of 1 to 100 keys, in the order of KEYS, as rl_refund_charge in algorithm.c
-- does; or to one key an amount of any charges, for rl_refund. From ARGV[2] on there are for each key: quota,
-- number of charges, charges. Limits that count refused quota then count the key's quota as refused, unless
-- it is 0 or the key is banned. Each charge has the LIMIT arguments of its limit and CHARGE more: the amount
-- in two parts (throttle: microseconds and nanoseconds; others: units and 0), time, place and life as in
-- RlCharge; then the mark in Redis (see life.lua) and the limit's number, or ''. A charge of another life is
-- not refunded, nor one that its mark does not have any more. If the time is -1, the mark has time, place and
-- life; if there is no mark, it is left for a minute, so that the call, if it still comes, takes nothing. If
-- the time is -2, the amount is of any charges, as far as there are some.
--
-- Returns 1, or the positions of the keys that have failed: these are not refunded. If
-- the first key fails, none is, and the reply is its error.
--@ clock state algorithms

local CHARGE, MINUTE = 6, 60000000
local at, i, failed = 2, 0, {}

-- Returns the value of a mark's field as a list. With "wait", leaves one without charges if there is none.
local function read_mark(field, value, wait)
  local words = {}
  for word in string.gmatch(value or '', '%S+') do
    words[#words + 1] = word
  end
  if wait and not value then
    put(field, string.format('%.0f', now + MINUTE), MINUTE)
  end
  return words
end

-- Queues a mark without the charges that were refunded, or deletes it if no units are left.
local function save_mark(field, words)
  for i = 4, #words, 2 do
    if words[i] == 'unit' then
      put(field, table.concat(words, ' '), words[1] - now)
      return
    end
  end
  drop(field)
end

local function refund_key()
  local from, to = at + 2, at + 1 + ARGV[at + 1] * (LIMIT + CHARGE)
  i = i + 1
  quota, at = tonumber(ARGV[at]), to + 1
  hash, set, gone, longest = KEYS[i], {}, {}, 0
  -- Most calls have one mark at most, which the last charge has too.
  local last = string.match(ARGV[to], '^%x+')
  local limits, ban, lease, born, value =
    load_limits(CHARGE, from, to, 'lease', 'born', last and 'mark:' .. last)
  local marks = {}
  for _, l in ipairs(limits) do
    -- Charges to limits with one tag change one state.
    local state = l.state
    local amount, rest, time, place, of_life, mark = unpack(ARGV, l.more, l.more + CHARGE - 1)
    if mark ~= '' then
      local field, number = string.match(mark, '^(%x+) (%d)$')
      local words, n = marks[field], 3 + 2 * number
      if not words then
        local kept = field == last and value or field ~= last and call('HMGET', hash, 'mark:' .. field)[1]
        words = read_mark('mark:' .. field, kept, time == '-1')
        marks[field] = words
      end
      amount = words[n] and words[n] ~= '-' and amount
      if amount and time == '-1' then
        time, place, of_life = words[2], words[n], words[n + 1]
      end
      if amount then
        words[n], words[n + 1], words.changed = '-', '0', true
      end
    end
    -- A calendar's state that looks unused may be that of another window.
    if time == '-2' then
      check_windows()
    end
    --@ life_of
    -- An entry of a log is found by its time, in any life.
    if amount and (state.charged or state.used) > 0 and
      (of_life == '0' or l.by_time or of_life == lease or of_life == life) then
      if time == '-2' then
        state:refund(tonumber(amount), tonumber(rest))
      else
        state:refund_charge(tonumber(time), tonumber(place), tonumber(amount), tonumber(rest), l)
      end
      state.changed = true
    end
  end
  if quota > 0 and not (ban and string.match(ban, '^%d+') + 0 > now) then
    for _, l in ipairs(limits) do
      if l.count_denied then
        l.state:deny()
        l.state.changed = true
      end
    end
  end
  for _, l in ipairs(limits) do
    if l.changed then
      l:save()
    end
  end
  for field, words in pairs(marks) do
    if words.changed then
      save_mark('mark:' .. field, words)
    end
  end
  write()
end

call('HDEL', hash, '')
refund_key()
while i < #KEYS do
  if not pcall(refund_key) then
    failed[#failed + 1] = i
  end
end
return #failed > 0 and failed or 1
