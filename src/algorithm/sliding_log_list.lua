end

local ARGV = {ARGV[1], '1', ARGV[3], 'sliding_log', tag, ARGV[4], ARGV[5], '', '', '', '', '0', '0'}

