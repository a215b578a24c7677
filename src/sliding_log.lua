-- sliding_log: every action's time; an entry exactly one period old is gone.
--
-- The log is a sorted set of its own, KEYS[l.log]; the hash's field only says
-- that it exists. An entry's score is its time, its member "before:quota",
-- where before is the sum of all quotas before it, so that the quota in use is
-- known from the first and the last entry. ARGV has capacity.
-- l.first, l.last: entries that count, or nil; l.drop: how much of the oldest
-- is to be removed; l.new: the entry to be added.

local function entry(reply)
  if reply[1] then
    local before, quota = string.match(reply[1], '^(%d+):(%d+)$')
    return {before = tonumber(before), quota = tonumber(quota), time = tonumber(reply[2]), member = reply[1]}
  end
end

local function member(before, quota)
  return string.format('%016.0f:%.0f', before, quota)
end

algorithms.sliding_log = {
  read = function(l, a)
    l.capacity = tonumber(ARGV[a])
    logs = logs + 1
    l.log = KEYS[logs + 1]
  end,

  load = function(l)
    l.used, l.drop = 0, 0
    l.gone = string.format('%.0f', now - l.period)
    l.first = entry(redis.call('ZRANGEBYSCORE', l.log, '(' .. l.gone, '+inf', 'WITHSCORES', 'LIMIT', 0, 1))
    if l.first then
      l.last = entry(redis.call('ZRANGE', l.log, -1, -1, 'WITHSCORES'))
      l.used = l.last.before + l.last.quota - l.first.before
    end
  end,

  -- Times never decrease, even if the clock does.
  take = function(l)
    l.new = {before = 0, quota = quota, time = now}
    if l.last then
      l.new.before = l.last.before + l.last.quota
      l.new.time = math.max(now, l.last.time)
    end
    l.used = l.used + quota
  end,

  -- The newest units up to capacity decide everything.
  deny = function(l)
    l:take()
    l.drop = math.max(l.used - l.capacity, 0)
    l.used = l.used - l.drop
  end,

  give = function(l)
    l.drop = math.min(quota, l.used)
    l.used = l.used - l.drop
  end,

  -- What an entry loses, all that are newer have less before them, or all that
  -- are older more: whichever are fewer.
  undo = function(l, _, mark, amount)
    if mark <= now - l.period then
      return
    end
    local score = string.format('%.0f', mark)
    while amount > 0 do
      local e = entry(redis.call('ZRANGE', l.log, score, score, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES'))
      if not e then
        break
      end
      local part = math.min(amount, e.quota)
      local older = redis.call('ZRANK', l.log, e.member)
      local low, high, shift = older + 1, redis.call('ZCARD', l.log) - 1, -part
      if older < high - older then
        low, high, shift = 0, older - 1, part
      end
      local others = low <= high and redis.call('ZRANGE', l.log, low, high, 'WITHSCORES') or {}
      redis.call('ZREM', l.log, e.member)
      if part < e.quota then
        redis.call('ZADD', l.log, score, member(e.before + math.max(shift, 0), e.quota - part))
      end
      -- In the order in which no two are ever alike.
      local first, last, step = 1, #others - 1, 2
      if shift > 0 then
        first, last, step = last, first, -2
      end
      for i = first, last, step do
        local o = entry({others[i], others[i + 1]})
        redis.call('ZREM', l.log, o.member)
        redis.call('ZADD', l.log, string.format('%.0f', o.time), member(o.before + shift, o.quota))
      end
      amount = amount - part
    end
    l.first, l.last = nil, nil
    l:load()
  end,

  -- The entry that holds the n-th oldest unit of those that count.
  unit = function(l, n)
    if not l.first or l.last.before + l.last.quota - l.first.before < n then
      return l.new
    end
    if l.first.quota >= n then
      return l.first
    end
    local low = redis.call('ZRANK', l.log, l.first.member) + 1
    local high = redis.call('ZCARD', l.log) - 1
    while low < high do
      local middle = math.floor((low + high) / 2)
      local e = entry(redis.call('ZRANGE', l.log, middle, middle, 'WITHSCORES'))
      if e.before + e.quota - l.first.before >= n then
        high = middle
      else
        low = middle + 1
      end
    end
    return entry(redis.call('ZRANGE', l.log, low, low, 'WITHSCORES'))
  end,

  wait = function(l, needed)
    return l:unit(l.drop + needed).time + l.period - now
  end,

  reset = function(l)
    return (l.new or l.last).time + l.period - now
  end,

  -- First what Redis may refuse because its memory is full: once a script has
  -- written, it refuses nothing.
  save = function(l)
    if l.new then
      redis.call('ZADD', l.log, string.format('%.0f', l.new.time), member(l.new.before, l.new.quota))
    end
    redis.call('ZREMRANGEBYSCORE', l.log, '-inf', l.gone)
    if not l.new and not l.last then
      drop(l.tag)
      return
    end
    while l.drop > 0 do
      local oldest = entry(redis.call('ZPOPMIN', l.log))
      local part = math.min(l.drop, oldest.quota)
      if part < oldest.quota then
        redis.call('ZADD', l.log, string.format('%.0f', oldest.time), member(oldest.before + part, oldest.quota - part))
      end
      l.drop = l.drop - part
    end
    keep(l.log, l:reset())
    put(l.tag, '1', l:reset())
  end
}
algorithms.sliding_log.__index = algorithms.sliding_log
