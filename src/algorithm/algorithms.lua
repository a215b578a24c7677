-- The algorithms of a call's limits. Each is made when a limit first needs it, because each
-- function costs a call time: its part "made".
setmetatable(algorithms, {__index = function(_, algorithm)
  --@ made of each
  return rawget(algorithms, algorithm)
end})
