-- Functions for scripts that get a list of limits.
--
-- ARGV[3] is the quota. From ARGV[LIMITS] on each limit has LIMIT arguments, in the order in
-- which load_limits unpacks them: algorithm, tag (the name of its field), period, four numbers
-- for the algorithm's "read", 1 if it counts refused quota, its ban's length (0: none; of one that
-- grows, the first), and "<refusals that bring it> limit <text>", with the longest length before
-- "limit" if it grows. A script for several keys sets hash, quota, and the queue of writes for each
-- key.
--
-- An algorithm is a table of functions of a limit l. "read" sets its numbers and
-- "load" its state. Then l.used is the quota in use. If the limit can count
-- refused quota, l.charged is the part of l.used that was charged. "take", "deny",
-- "refund" (of an amount in two parts, of any charges) and "refund_charge" change l only; "save" queues l for
-- write(). An algorithm of units has "wait" and "reset"; one that has "fits" instead reports its backlog,
-- l.us and l.ns.
--
-- Some also have denied_field, for the log of refused quota; by_time, if a charge is found by its time,
-- in any life; held, if the units of a transaction are refunded at its end; and "take_own", to take the
-- quota of a reservation, which then has l.place.
--
-- no_window is true if the time is in none of the windows that came with a calendar.

local LIMITS, LIMIT = 4, 10
local quota = tonumber(ARGV[3])
local algorithms = {}
-- The most refused quota that a state counts.
local MOST = 1e15
local set, gone, longest, expiry = {}, {}, 0
local no_window = false
-- A calendar's state is kept two days longer than its window: for another server, whose
-- zone data differ, the window may not have ended yet.
local CALENDAR_SLACK = 172800000000

-- Raises an error with the time if that is in none of the windows. Then the script, which
-- has changed nothing, is called again with the windows around this time.
local function check_windows()
  if no_window then
    no_window = false
    error({err = string.format('NOWINDOW %.0f', now)})
  end
end

-- Two whole numbers as fields have them.
local function pair_text(a, b)
  return string.format('%.0f %.0f', a, b)
end

local function pair(value)
  local a, b = string.match(value, '^(%d+) (%d+)$')
  return tonumber(a), tonumber(b)
end

-- Returns the start, the end and the count of the refusals that a ban counts.
local function refusals(l, value)
  if l.calendar then
    local start, ends, count = string.match(value, '^(%d+) (%-?%d+) (%d+)$')
    return tonumber(start), tonumber(ends), tonumber(count)
  end
  local start, count = pair(value)
  return start, start + l.period, count
end

-- Queues a field that is needed for this time in microseconds.
local function put(field, value, us)
  set[#set + 1] = field
  set[#set + 1] = value
  longest = math.max(longest, us)
end

local function drop(field)
  gone[#gone + 1] = field
end

-- In a full Redis only the first write of a script fails. So that of a charge comes first, which
-- needs memory, and what comes behind it must not fail (see expiry.lua). Refunds begin with HDEL of
-- a field that no hash has: a full Redis runs them, and a replica, whose data are old, does not.
local function write()
  if #set > 0 then
    local needed = longest
    --@ expiry
    --@ keep_all
    if #gone > 0 then
      redis.pcall('HDEL', hash, unpack(gone))
    end
  elseif #gone > 0 then
    call('HDEL', hash, unpack(gone))
    pcall(function()
      -- Ends the deletion of fields: deletes a hash that has no state and no ban left, and
      -- sets the expiry of another hash if it is not that of the field. A hash that also has a field for
      -- each of many resets is left to its expiry.
      --< after_deletion()
      local left, most = 0, 32
      if call('HLEN', hash) <= most then
        -- All of them. The user in Redis need not have +hkeys.
        local fields = call('HRANDFIELD', hash, most)
        for _, field in ipairs(fields) do
          if field ~= 'expiry' and field ~= 'lease' and field ~= 'born' and
            string.sub(field, 1, 6) ~= 'reset:' then
            left = left + 1
          end
        end
        if left == 0 then
          if #fields > 0 then
            call('HDEL', hash, unpack(fields))
          end
          return
        end
      end
      local expiry, needed, set = call('HMGET', hash, 'expiry')[1], 0, {}
      --@ expiry
      if expires then
        --@ keep_all
      end
      -->
    end)
  end
end

-- Reads and loads the limits, from ARGV[from] to ARGV[to], with "more" arguments after each,
-- from ARGV[l.more] on. Returns the limits, the field "ban", and the fields "also", "too" and "beside" if
-- they are not nil, and sets "expiry". Of limits with one tag, only the first is loaded; it is l.state of all
-- of them.
local function load_limits(more, from, to, also, too, beside)
  local limits, names, states = {}, {'ban', 'expiry', also, too, beside}, {}
  for a = from or LIMITS, to or #ARGV, LIMIT + more do
    local algorithm, tag, period, n1, n2, n3, n4, count_denied, ban, after = unpack(ARGV, a, a + LIMIT - 1)
    local l = setmetatable({
      tag = tag, period = tonumber(period), count_denied = count_denied == '1',
      ban = tonumber(ban), after = after, more = a + LIMIT
    }, algorithms[algorithm])
    l:read(n1, n2, n3, n4)
    limits[#limits + 1] = l
    l.state = states[l.tag] or l
    if l.state == l then
      states[l.tag] = l
      names[#names + 1] = l.tag
      l.at = #names
      if l.denied_field then
        names[#names + 1] = l.tag .. l.denied_field
      end
      if l.ban > 0 then
        names[#names + 1] = l.tag .. ':refused'
        l.refusals = #names
      end
    end
  end
  local values = call('HMGET', hash, unpack(names))
  for _, l in ipairs(limits) do
    if l.state == l then
      l:load(values[l.at], values[l.at + 1])
      l.refusals = l.refusals and values[l.refusals]
    end
  end
  expiry = values[2]
  return limits, values[1], also and values[3], too and values[4], beside and values[5]
end
