-- token_bucket: refill tokens arrive together each period.
--
-- For the field, see "A key in Redis" in src/README.md. The action that finds a full bucket
-- sets the anchor.

--< made(algorithms, quota, put)
algorithms.token_bucket = {
  algorithm = 'token_bucket',
  read = function(l, first, second)
    --< numbers(first, second) -> capacity, refill
    local capacity, refill = tonumber(first), tonumber(second)
    -->
    l.capacity, l.refill = capacity, refill
  end,

  load = function(l, value)
    local period, refill = l.period, l.refill
    --< load(value, period, refill) -> anchor, used
    local anchor, used = now, 0
    if value then
      local since, missing = string.match(value, '^(%d+) (%d+)$')
      local lumps = math.max(math.floor((now - since) / period), 0)
      if lumps < math.ceil(missing / refill) then
        anchor, used = since + lumps * period, missing - lumps * refill
      end
    end
    -->
    l.anchor, l.used = anchor, used
  end,

  take = function(l)
    local used = l.used
    --< take(used, quota) -> used
    used = used + quota
    -->
    l.used = used
  end,

  refund = function(l, units)
    l.used = math.max(l.used - units, 0)
  end,

  -- The anchors are of one series unless the bucket was full in between.
  -- "of" is the limit that was charged, if it can be another one with this state.
  refund_charge = function(l, _, place, amount, _, of)
    local anchor, used, period, refill = l.anchor, l.used, l.period, (of or l).refill
    --< free(anchor, used, place, amount, period, refill) -> used
    if (anchor - place) % period == 0 then
      local lumps = math.max(math.floor((now - place) / period), 0)
      if lumps < math.ceil(amount / refill) then
        used = math.max(used - (amount - lumps * refill), 0)
      end
    end
    -->
    l.used = used
  end,

  wait = function(l, needed)
    local anchor, period, refill = l.anchor, l.period, l.refill
    --< wait reset(anchor, needed, period, refill) -> free
    -- At most a hundred years: more is possible only if the limit's numbers changed.
    local free = anchor + math.min(math.ceil(needed / refill) * period, 3155760000000000) - now
    -->
    return free
  end,

  reset = function(l)
    return l:wait(l.used)
  end,

  save = function(l)
    local anchor, used = l.anchor, l.used
    --< text(anchor, used) -> text
    local text = string.format('%.0f %.0f', anchor, used)
    -->
    local free = l:reset()
    local lives
    --< lives(free) -> lives
    lives = free
    -->
    put(l.tag, text, lives)
  end
}
algorithms.token_bucket.__index = algorithms.token_bucket
-->

-- The charge of a settlement.
--< add(used, units, period, refill, MOST) -> used
used = math.max(math.min(used + units, math.floor(3155760000000000 / period) * refill, MOST), used)
-->

--< owe(l, units, MOST)
local used, period, refill = l.used, l.period, l.refill
--@ add
l.used = used
-->

-- When the state ends, for expiry.lua. The refill is not known, so it counts as 1.
--< ends(value, rest, match) -> ends
local anchor, missing = match(value, '^(%d+) (%d+)$')
ends = anchor + missing * match(rest, '^%d+')
-->

-- The place of a charge that was just taken: the anchor, also if that is later because the clock was set
-- back.
--< place(l) -> place
place = l.anchor
if place > now then
  place = place - math.ceil((place - now) / l.period) * l.period
end
-->

-- For lease.lua: begins as load does for a full bucket; and the time in which others cannot be charged units
-- in place of those that are charged now.
--< emptied(l)
l.anchor = now
-->

--< time_left(l) -> left
left = l.anchor + l.period - now
-->

-- A limit with this state tag, or nil if it is none, for inspect.lua. "rest" is the tag behind the algorithm.
--< limit(rest, match) -> limit
limit = match(rest, '^%d+$') and {refill = 0}
-->

-- The refill is not known, so only before it are the units in use.
--< shown(l, value, pair) -> used, ends
used, ends = now < pair(value) + l.period and used or nil, nil
-->

-- For list.lua.
--< listed(value, period, first, second, quota, reply) -> written, lives
--@ units
-->

-- The place of the charge in a new value of the field, as text, or nil if it is another one.
--< list_place(written) -> place
place = string.match(written, '^%d+')
place = place + 0 <= now and place or nil
-->

-- For settle_simple.lua. The field of a full bucket stays, as after all refunds.
--< settled(value, more, second, units, place, period, MOST) -> was, written, lives
local refill, amount = second, units
--@ load
was = used
if more > 0 then
  --@ add
else
  --@ free
end
if used > 0 or was > 0 then
  --@ text
  local needed = used
  --@ reset
  written, lives = text, free
end
-->
