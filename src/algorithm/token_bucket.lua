-- token_bucket: refill tokens arrive together each period.
--
-- The field is "anchor missing": the start of the period at whose end the next
-- tokens arrive, and the number of missing tokens. A bucket that was never used
-- has no field. The action that finds a full bucket sets the anchor.

algorithms.token_bucket = {
  read = function(l, capacity, refill)
    l.capacity, l.refill = tonumber(capacity), tonumber(refill)
  end,

  load = function(l, value)
    l.anchor, l.used = now, 0
    if value then
      local anchor, missing = pair(value)
      local lumps = math.max(math.floor((now - anchor) / l.period), 0)
      if lumps < math.ceil(missing / l.refill) then
        l.anchor, l.used = anchor + lumps * l.period, missing - lumps * l.refill
      end
    end
  end,

  take = function(l)
    l.used = l.used + quota
  end,

  refund = function(l)
    l.used = math.max(l.used - quota, 0)
  end,

  -- The anchors are of one series unless the bucket was full in between.
  refund_charge = function(l, _, anchor, amount)
    if (l.anchor - anchor) % l.period == 0 then
      local lumps = math.max(math.floor((now - anchor) / l.period), 0)
      if lumps < math.ceil(amount / l.refill) then
        l.used = math.max(l.used - (amount - lumps * l.refill), 0)
      end
    end
  end,

  -- At most a hundred years: more is possible only if the limit's numbers changed.
  wait = function(l, needed)
    return l.anchor + math.min(math.ceil(needed / l.refill) * l.period, 3155760000000000) - now
  end,

  reset = function(l)
    return l:wait(l.used)
  end,

  save = function(l)
    put(l.tag, pair_text(l.anchor, l.used), l:reset())
  end
}
algorithms.token_bucket.__index = algorithms.token_bucket
