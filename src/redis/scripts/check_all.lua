-- Charges one action to several keys, or to none of them. For each key there are,
-- from ARGV[2] on: the number of its limits (negative if the transaction may have to refund
-- them, with a mark behind it under a concurrent limit, see life.lua), its quota, and its limits.
--
-- Returns for each key the numbers that check.lua returns, and a text if keys are banned: a
-- line for each of them, with the limit that set the ban. The action is allowed if all
-- verdicts are 0; otherwise each key has the verdict of its own limits, and counts a
-- refusal unless it is banned.
--@ clock state algorithms act

--@ late
local keys, allowed, at, units = {}, true, 2, 0
for i, name in ipairs(KEYS) do
  local minus, n, mark = string.match(ARGV[at], '^(-?)(%d+) ?(%x*)$')
  local refundable, late = minus == '-'
  mark = mark ~= '' and mark
  hash, quota = name, tonumber(ARGV[at + 1])
  local limits, ban, born
  limits, ban, born, late =
    load_limits(0, at + 2, at + 1 + n * LIMIT, refundable and 'born' or nil, mark and 'mark:' .. mark or nil)
  if late then
    return redis.error_reply(LATE)
  end
  keys[i] =
    {hash = hash, quota = quota, limits = limits, expiry = expiry, refundable = refundable, born = born,
    mark = mark}
  keys[i].verdict, keys[i].by = decide(limits, ban)
  allowed = allowed and keys[i].verdict == 0
  at, units = at + 2 + n * LIMIT, units + quota
end
if units == 0 then
  -- It only looks, which a replica must not do. No hash has this field.
  call('HDEL', hash, '')
end

-- A field with an invalid value raises an error. So no key is written before all are decided.
local reply, rules = {}, {}
for _, key in ipairs(keys) do
  local first = #reply + 1
  hash, quota, set, gone, longest = key.hash, key.quota, {}, {}, 0
  reply[first], reply[first + 1], reply[first + 2] = key.verdict, 0, now
  reply[first + 1] = act(key.limits, key.verdict == 0 and not allowed and -1 or key.verdict, reply, true)
  if key.refundable then
    local limits, born, charged = key.limits, key.born, allowed
    --@ append_lives
    local mark = key.mark
    if mark then
      --@ put_mark
    end
  end
  key.set, key.gone, key.longest = set, gone, longest
  if key.verdict > 0 then
    rules[#rules + 1] = (key.by or '') .. '\n'
  end
end
for _, key in ipairs(keys) do
  hash, set, gone, longest, expiry = key.hash, key.set, key.gone, key.longest, key.expiry
  write()
end
if #rules > 0 then
  reply[#reply + 1] = table.concat(rules)
end
return reply
