-- The algorithms for reservations. Each is made when a limit first needs it, because each
-- function costs a call time.
local make = {
  throttle = function()
    --@ gcra owe_gcra
  end,
  token_bucket = function()
    --@ token_bucket owe_token_bucket
  end,
  fixed_window = function()
    --@ fixed_window owe_fixed_window
  end,
  sliding_window = function()
    --@ sliding_window owe_sliding_window
  end,
  concurrent = function()
    --@ concurrent log_refund log_own owe_sliding_log
  end
}
make.sliding_log = make.concurrent

local function use(name)
  if not algorithms[name] then
    make[name]()
  end
  return algorithms[name]
end
