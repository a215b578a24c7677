-- How luacheck reads the scripts, as Redis gets them.
std = 'lua51'
read_globals = {'redis', 'KEYS', 'ARGV', 'cjson', 'cmsgpack', 'struct', 'bit'}
not_globals = {'dofile', 'io', 'loadfile', 'module', 'package', 'print', 'require'}
max_line_length = false
ignore = {
  -- A part defines its own variables, wherever it is named.
  '42', '43',
  -- Shared parts define these, and not every script uses each of them.
  '211/CALENDAR_SLACK', '211/CHUNK', '211/MOST', '211/check_windows', '211/drop', '211/hash', '211/load_limits',
  '211/pair_text', '211/quota', '211/refusals', '211/set_chunk', '211/units_at', '211/write', '231/least', '2[13]1/no_window', '[23]11/needed'
}
