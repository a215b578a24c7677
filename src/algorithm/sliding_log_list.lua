end

local ARGV = {'', '1', ARGV[2], 'sliding_log', tag, ARGV[3], ARGV[4], '', '', '', '', '0', '0'}

