-- One key and its list of limits. See ../check.lua.
--@ clock list of check state

-- Makes the algorithms as algorithms.lua does, but not in a function, which would need a reference to
-- each local variable. An algorithm can be based on another one.
for a = LIMITS, #ARGV, LIMIT do
  for _ = 1, 2 do
    local algorithm = ARGV[a]
    if not algorithms[algorithm] then
      --@ base of each
      --@ made of each
    end
  end
end
--@ act check
