# rl_bans and rl_inspect where the keys are many, on several servers, foreign or
# changing, and where the user in Redis may not run the commands that they need.
#
# RATELIMIT_KEYS is the number of keys in the large Redis (250,000).
#
use RatelimitTest;
use LyingServer;
use List::Util qw(first max min);
use RedisCluster;
use RedisServer qw(documented_user);

my $KEYS = steps(250_000, 'RATELIMIT_KEYS', 4);
my $BANNED = 1000;

my ($user, $password, @rule) = documented_user();
my @second_rule = slurp_file("$FindBin::RealBin/../../docs/operations.md") =~ /^redis-cli ACL SETUSER ratelimit (\+scan .*)$/m
  ? map { s/'//gr } split / /, $1 : die 'the documentation has no second rule';
my ($redis, $node, $session) = start_servers(\&shared_node, "ratelimit.denial_cache = off", 'ratelimit.retry_interval = 0');
my $watcher = session($node);

# Returns the keys that rl_bans returns, sorted.
sub bans
{
	my ($of, $pattern) = @_;

	return [ sort split /\n/, $of->ask("SELECT key FROM rl_bans('" . ($pattern // '%') . "')") ];
}

# Bans keys in a session.
sub ban
{
	my ($of, @keys) = @_;

	$of->ends("SELECT count(rl_ban(key, 3600)) FROM unnest('{" . join(',', map { "\"$_\"" } @keys) . "}'::text[]) key", 'bans');
	return;
}

#
# Many keys
#

# Adds keys with a throttle each.
sub add_keys
{
	my ($name, $from, $to) = @_;

	for (my $i = $from; $i <= $to; $i += 20_000)
	{
		$redis->cli('EVAL', q{
			for i = ARGV[1], ARGV[2] do
				redis.call('HSET', 'rl:{' .. KEYS[1] .. ':' .. string.format('%.0f', i) .. '}', 'throttle:10000000', '1793325602000000000')
			end}, 1, $name, $i, min($i + 19_999, $to));
	}
	return;
}

add_keys('key', 1, $KEYS);
my @banned = sort map { 'key:' . int($KEYS / $BANNED * $_) } 1 .. $BANNED;
ban($session, @banned);
is($redis->cli('DBSIZE'), $KEYS, "$KEYS keys, $BANNED of them banned");

# Reads the bans; adds to each step's times in Redis, and returns how long all took, and
# how much memory of its own the backend needed meanwhile, in MB.
my (@reads, %steps);

sub read_all
{
	my $status = '/proc/' . $session->pid . '/status';
	my $kb = sub { my ($what) = @_; return slurp_file($status) =~ /^$what:\s+(\d+)/m ? $1 : die "no $what" };

	# Not for the commands that the script calls.
	$redis->cli('CONFIG', 'SET', 'slowlog-log-slower-than', 500);
	$redis->cli('SLOWLOG', 'RESET');
	append_to_file('/proc/' . $session->pid . '/clear_refs', '5');    # VmHWM becomes VmRSS
	my $before = $kb->('VmRSS');
	my $got = $session->attempt(q{SELECT md5(string_agg(key, ' ' ORDER BY key COLLATE "C")) FROM rl_bans()});
	my $mb = ($kb->('VmHWM') - $before) / 1024;
	$redis->cli('CONFIG', 'SET', 'slowlog-log-slower-than', -1);
	is($got->{answer}, $session->ask(q{SELECT md5('} . join(' ', @banned) . q{')}), 'the banned keys, and no others') or diag $got->{message};
	foreach my $entry (grep { $_->[3][0] =~ /^EVAL/i && $_->[3][2] eq '0' && @{ $_->[3] } == 7 } @{ $redis->cli('SLOWLOG', 'GET', -1) })
	{
		my $step = $steps{ $entry->[3][4] } ||= {};

		push @{ $step->{ms} }, $entry->[2] / 1000;
		$step->{call} = $entry->[3];
	}
	return [ $got->{ms} / 1000, $mb ];
}

# Returns how long a step takes, in milliseconds.  The machine may be busy, so the best of
# its times counts, and a step that took too long is made again.
sub step_ms
{
	my ($step) = @_;
	my @ms = @{ $step->{ms} };

	return @ms < @reads ? 0 : min(@ms) <= 5 ? min(@ms) : min(@ms, measures(5, sub {
		$redis->cli('CONFIG', 'RESETSTAT');
		$redis->cli(@{ $step->{call} });
		return $redis->field('commandstats', 'cmdstat_evalsha') =~ /^calls=1,usec=(\d+)/ ? $1 / 1000 : die 'no call';
	}));
}

$redis->cli('CONFIG', 'SET', 'slowlog-max-len', 100_000);
$redis->cli('CONFIG', 'RESETSTAT');
push @reads, read_all() foreach 1 .. 2;
my $calls = $redis->calls('evalsha') / @reads;
my $least = min(map { $_->[0] } @reads);
my $longest = max(0, map { step_ms($_) } values %steps);
note sprintf 'measured: rl_bans over %d keys: %.1f s, %d steps, the longest %.1f ms, %.1f MB', $KEYS, $least,
  $calls, $longest, max(map { $_->[1] } @reads);
cmp_ok($longest, '<=', 5, 'no step takes Redis more than 5 ms');
cmp_ok(max(map { $_->[1] } @reads), '<', 20, 'the backend needs less than 20 MB');

# Cancels it at different moments of its first half; again if a busy machine was too late for that.
my @late;
foreach my $try (1 .. 5)
{
	my ($state, $ended, $asked);

	foreach (1 .. 20)
	{
		$session->send(q{SELECT state || ',' || extract(epoch FROM ended) FROM attempt('SELECT count(*) FROM rl_bans()');});
		await('rl_bans', sub { return $watcher->ask(q{SELECT wait_event_type FROM pg_stat_activity WHERE pid = } . $session->pid) eq 'Extension' });
		$watcher->ask("SELECT pg_sleep($try * $least / 10)");
		($asked) = split /\|/, $watcher->ask('SELECT extract(epoch FROM clock_timestamp()), pg_cancel_backend(' . $session->pid . ')');
		($state, $ended) = split /,/, $session->ask('');
		last if $state ne '00000';
	}
	is($state, '57014', "cancel, try $try");
	push @late, ($ended - $asked) * 1000;
}
note "cancelled after @late ms";
cmp_ok(min(@late), '<=', 50, 'a cancel acts within 50 ms');
is($session->ask(q{SELECT rl_allow('after', '1/1h')}), 't', 'the session can make the next call');

# A connection that is lost ends it, because another server has other cursors.
$session->send(q{SELECT state, message FROM attempt('SELECT count(*) FROM rl_bans()');});
await('rl_bans', sub { return $watcher->ask(q{SELECT wait_event_type FROM pg_stat_activity WHERE pid = } . $session->pid) eq 'Extension' });
$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
like($session->ask(''), qr/^PT504\|lost the connection to Redis: /, 'a lost connection is an error');
$redis->cli('FLUSHALL', 'ASYNC');
is_deeply(bans($session), [], 'no ban');

# Reads while Redis's table of keys grows and shrinks.
my $added = is_long() ? 40_000 : 10_000;
ban($session, @banned);
foreach my $round (1 .. 8)
{
	$session->send('SELECT count(*), count(DISTINCT key) FROM rl_bans();');
	if ($round < 5) { add_keys("new$round", 1, $added); }
	else { $redis->cli('EVAL', q{for i = 1, ARGV[2] do redis.call('DEL', 'rl:{new' .. ARGV[1] .. ':' .. i .. '}') end}, 0, $round - 4, $added); }
	is($session->ask(''), "$BANNED|$BANNED", "each ban once, while the table of keys changes, round $round");
}
$redis->cli('FLUSHALL');

#
# Many bans, of long keys
#

my $long = 'x' x 500;
is($session->ask("SELECT count(rl_ban('$long' || n, 3600, repeat('r', 128))) FROM generate_series(1, 1500) n"), 1500, '1,500 long keys are banned');
is($session->ask('SELECT count(*), count(DISTINCT key), min(length(key)), min(length(reason)) FROM rl_bans()'), '1500|1500|501|128', 'rl_bans returns all of them');
is($session->ask("SELECT count(*) FROM rl_bans('%99')"), 15, 'a pattern returns some of them');
$session->ask("SET work_mem = '64kB'");
is($session->ask('SELECT count(*) FROM rl_bans()'), 1500, 'a sort with little memory');
$session->ask('RESET work_mem');

#
# Keys of other programs, and invalid keys
#

$redis->cli('FLUSHALL');
ban($session, 'ours');
my ($ends) = $redis->cli('HGET', 'rl:{ours}', 'ban') =~ /^(\d+) /;
$redis->cli('SET', 'rl:{string}', 'x');
$redis->cli('RPUSH', 'rl:{list}', 'ban', $ends);
$redis->cli('SADD', 'rl:{set}', 'ban');
$redis->cli('ZADD', 'rl:{zset}', $ends, 'ban');
$redis->cli('XADD', 'rl:{stream}', '*', 'ban', $ends);
$redis->cli('HSET', "rl:{hash $_}", 'ban', $_) foreach '', 'x', '-1', '1e300', 'inf', 'nan', '9' x 1000, '1', 'x' x 100_000;
$redis->cli('HSET', "rl:{$_}", 'ban', $ends)
  foreach '', '%', '%7', '%zz', '%00', '%7b', "\xff", "\xed\xa0\x80", "a\0b", 'a{b', 'a}b', 'x' x 513, '%25' x 513, 'x' x 100_000;
$redis->cli('HSET', $_, 'ban', $ends) foreach 'rl:ours', 'rl:{ours', 'rl:{ours}{x', 'rl:{ours}x}', 'rl:{}x', 'rl:{%7Bour%7Dx}', 'xrl:{ours}', 'rl{ours}', 'RL:{ours}', '{ours}';
$redis->cli('HSET', 'rl:{ours}x', 'ban', $ends);
is_deeply(bans($session), [ 'ours', '{ours}x' ], 'only keys of the extension');
is($session->ask(q{SELECT count(*) FROM rl_inspect('hash x')}), 0, 'an invalid ban');
is($session->attempt(q{SELECT rl_inspect('string')})->{state}, 'PT504', 'rl_inspect of another type is an error');
$redis->cli('HSET', 'rl:{mixed}', 'field', 'x', 'throttle', 'x', 'throttle:x', 'x', 'throttle:1:2', 'x', 'sliding_window:60', 'x', 'sliding_log:60:7', 'x',
	'sliding_log:60:chunks', 'x', 'sliding_log:60:denied:3', 'x', 'ban:refused', 'x', ':refused', 'x', 'other:60', 'x', 'ban', $ends);
is($session->ask(q{SELECT state, raw FROM rl_inspect('mixed')}), "ban|$ends", 'other fields are left out');
$redis->cli('HSET', 'rl:{many}', map { ("field:$_", 1) } 1 .. 4097);
like($session->attempt(q{SELECT rl_inspect('many')})->{message}, qr/the key has more than 4096 fields/, 'too many fields');
my $window = '101 ' . join ' ', map { int($ends / 1000) . ':1' } 1 .. 101;
$redis->cli('HSET', 'rl:{states}', map { ("sliding_window:$_:1000", $window) } 1 .. 257);
like($session->attempt(q{SELECT rl_inspect('states')})->{message}, qr/the key has more than 256 states/, 'too many states');
$redis->cli('HDEL', 'rl:{states}', 'sliding_window:1:1000');
is($session->ask(q{SELECT count(*), count(DISTINCT state), min(used), max(used), max(length(raw)) FROM rl_inspect('states')}),
	'256|256|101|101|256', '256 states are returned');

# Bans that another program has changed are in force, and are listed.
$redis->cli('FLUSHALL');
my %others = (' 7' => '|', ' 7 limit x' => 'x|', ' 7 reason x' => '|x', ' 7 reason ' => '|', ' 7 other' => '|', ' x' => '|', 'x' => '|',
	" 7 reason a\xff" => '|a', " 7 reason a\xc3\xa9" => "|a\xc3\xa9", " 7 reason a\nb" => '|a\x0ab', ' 7 limit ' . 'x' x 1000 => 'x' x 250 . '|', ' ' . '7' x 30 => '|');
foreach my $other (sort keys %others)
{
	my $value = $ends . $other;

	$redis->cli('HSET', 'rl:{other}', 'ban', $value);
	is($session->ask(q{SELECT extract(epoch FROM until) * 1e6 = } . $ends . q{, extract(epoch FROM began), rule, reason FROM rl_bans()}),
		't|' . ($other =~ /^ 7(?!7)/ ? '0.000007' : '') . "|$others{$other}", 'a ban' . substr($other, 0, 12) =~ s/[^ -~]/?/gr);
	is($session->ask(q{SELECT state, left(raw, 18) FROM rl_inspect('other')}), 'ban|' . (substr($value, 0, 18) =~ s/\n.*//sr), 'rl_inspect shows it');
	is($session->ask(qq{SELECT count(*) FROM unnest('{5/1h,token_bucket 5/1h,"5/1h, 5/1d","5/1h, concurrent 5/1h"}'::rl_limits[]) l, rl_check('other', l) c WHERE source = 'ban'}),
		4, 'it is in force');
}

# The level depends on the length and on the rule.
foreach my $case ([ 1, 60, '5/1min ban 1min to 1h after 1' ], [ 2, 61, '5/1min ban 1min to 1h after 1' ], [ 6, 1920, '5/1min ban 1min to 1h after 1' ],
	[ 7, 3600, '5/1min ban 1min to 1h after 1' ], [ 7, 99_999, '5/1min ban 1min to 1h after 1' ], [ 1, 1, '5/1min ban 1min to 1h after 1' ],
	[ 50, 315_000_000, '5/1min ban 1us to 3652d after 1' ], [ '', 60, '5/1min ban 1min after 1' ], [ '', 60, '5/1min ban 1h to 1min after 1' ],
	[ '', 60, '5/1min ban 1min to 1h after 1, 5/1h' ], [ '', 60, "5/1min ban 1min to 1h after 1 \xc3\xa9" ], [ 1, 60, 'fixed_window 5/day in Europe/Berlin ban 1min to 1h after 1' ],
	[ '', 60, 'fixed_window 5/day in Nowhere ban 1min to 1h after 1' ], [ '', 60, 'unlimited' ])
{
	my ($level, $seconds, $rule) = @$case;

	$redis->cli('HSET', 'rl:{other}', 'ban', sprintf '%d %d limit %s', $ends, $ends - 1_000_000 * $seconds, $rule);
	is($session->ask('SELECT level FROM rl_bans()'), $level, "the level of $seconds s of $rule") or diag $session->error;
}
$redis->cli('HSET', 'rl:{other}', 'ban', "$ends - limit 5/1min ban 1min to 1h after 1");
is($session->ask('SELECT level FROM rl_bans()'), '', 'no level without a beginning');

# The level is kept after the ban, until rl_unban deletes it.
$redis->cli('FLUSHALL');
$session->ask(q{SELECT rl_allow('grows', '1/1h ban 0.2s to 1h after 1') FROM generate_series(1, 2)});
await('the end of the ban', sub { return $session->ask('SELECT count(*) FROM rl_bans()') == 0 });
$redis->cli('HSET', 'rl:{grows}', 'ban:level', 4 * 10**15 . ' 1800000000');
is($session->ask(q{SELECT state, raw FROM rl_inspect('grows') WHERE state ~ 'ban'}), 'ban:level|4000000000000000 1800000000', 'rl_inspect shows the level');
$session->ask(q{SELECT rl_allow('grows', '1/1h ban 0.2s to 1h after 1')});
is($session->ask('SELECT until - began, level FROM rl_bans()'), '01:00:00|16', 'the next ban is twice as long');
is($session->ask(q{SELECT rl_unban('grows')}), 't', 'rl_unban');
is_deeply([ sort @{ $redis->cli('HKEYS', 'rl:{grows}') } ], [ 'expiry', 'throttle:3600000000' ], 'nothing of the ban is left');

# Bans and keys end meanwhile.
$redis->cli('FLUSHALL');
my ($last, @wrong) = (is_long() ? 1000 : 300);
$session->ask("SELECT count(rl_ban(n::text, 0.001 * n)) FROM generate_series(1, $last) n");
while ($last > 0)
{
	my $n = $session->ask('SELECT count(*) FROM rl_bans()');

	push @wrong, "$n after $last: " . $session->error if $session->error ne '' || $n > $last;
	$last = $n;
}
none(\@wrong, 'bans end one after the other');

# The time in Redis of a look at the longest log, with its refusals.
my $log = q{
	local now = redis.call('TIME')
	now = now[1] * 1000000 - 1000000
	for _, log in ipairs({'sliding_log:86400000000', 'sliding_log:86400000000:denied'}) do
		local index = {}
		for n = 0, 389 do
			local chunk = {}
			for i = 1, 256 do chunk[i] = string.format('%016.0f%06.0f', now + n * 256 + i, 1) end
			redis.call('HSET', KEYS[1], log .. ':' .. n, table.concat(chunk))
			index[n + 1] = string.format('%016.0f%06.0f%010.0f', now + n * 256 + 256, 256, n)
		end
		redis.call('HSET', KEYS[1], log .. ':chunks', table.concat(index))
		redis.call('HSET', KEYS[1], log, '99841 0 0 0 0 390 ' .. string.format('%016.0f%06.0f', now + 100000, 1))
	end
};
$redis->cli('EVAL', $log, 1, 'rl:{long}');
$redis->cli('CONFIG', 'SET', 'slowlog-log-slower-than', 0);
my @ms = measures(5, sub {
	$redis->cli('SLOWLOG', 'RESET');
	is($session->ask(q{SELECT state, used, length(raw) FROM rl_inspect('long')}), 'sliding_log:86400000000|199682|40', 'a long log');
	return max(map { $_->[3][0] =~ /^EVAL/i ? $_->[2] / 1000 : 0 } @{ $redis->cli('SLOWLOG', 'GET', -1) });
});
cmp_ok(min(@ms), '<=', 5, "rl_inspect of a log of 199,682 entries takes Redis at most 5 ms (@ms)");

#
# The user in Redis
#

$redis->cli('FLUSHALL');
ban($session, 'ours');
$session->ask(q{SELECT rl_allow('ours', '1/1h ban 1h after 2')});
my $of_user = session($node);
my %as_user = (redis_passfile => password_file($password));
$of_user->set(%as_user, redis_url => $redis->url(user => $user));
is_deeply(\@second_rule, [ '+scan', '+cluster|shards', '+hkeys' ], 'the second rule');
foreach my $left_out ('', @second_rule)
{
	$redis->cli('ACL', 'DELUSER', $user);
	$redis->cli('ACL', 'SETUSER', $user, @rule, grep { $_ ne $left_out } @second_rule);
	foreach my $call (q{rl_bans()}, q{rl_inspect('ours')})
	{
		my $got = $of_user->attempt("SELECT string_agg(c::text, ' ') FROM $call c");
		my $needs = $left_out ne '' && ($left_out eq '+hkeys' xor $call =~ /bans/);

		is($got->{state}, $needs ? 'PT504' : '00000', "$call without $left_out") or diag $got->{message};
		next unless $needs;
		$of_user->ask("SELECT * FROM $call");
		like($of_user->error, qr/DETAIL: .*The user in Redis needs .*\Q$left_out\E/, 'the error names the privilege');
	}
}
$redis->cli('ACL', 'SETUSER', $user, @rule, @second_rule);
$of_user->set(key_prefix => 'other:');
is_deeply(bans($of_user), [], 'another prefix has no keys');
is($of_user->attempt(q{SELECT rl_inspect('ours')})->{state}, 'PT504', 'a key that the user may not read is an error');

#
# Servers that lie
#

$of_user->quit;
# A file has what the server answers, so that one server gives all answers.
my $answer = PostgreSQL::Test::Utils::tempdir . '/answer';
my $liar = LyingServer->new(sub { my $text = slurp_file($answer); return @_ == 4 && $text !~ /^6379/ ? "\$0\r\n\r\n" : '$' . length($text) . "\r\n$text\r\n" });
sub answer_is { my ($text) = @_; unlink $answer; append_to_file($answer, $text); return; }

$session->set(redis_url => $liar->url, command_timeout => '10s');
foreach my $text ('', 'hello', '0', '1:', '1:0', '2:0', '2:0x', '1:0x', '1:01 ', '0:1 1 1:a0:1:', '1:01 2:x', '1:0x 1:x', '1:01 9999999999:x', '1:0' . '9' x 19 . ' 1:x', '30:' . '0' x 30,
	'0:', '-:', '1:01 1:xx', '1:0- 1:x', '0:1 1 1:', '0:1 1 1:a5:x', "0:1 1 1:\x011:x", '99:', "1:\xff",
	'1:01 1 1:x', '1:01 1 1:x2:y', '1:01 1 2:x0:', '1:01 x 1:x0:', '1:01 1 1:x0:x', '1:01 1 1:x-:', '0:- 1 3:ban9:x', "0:1 1 1:a2:\xc3\xa9")
{
	answer_is($text);
	foreach my $call ('rl_bans()', q{rl_inspect('k')})
	{
		my $got = $session->attempt("SELECT count(*) FROM $call");
		my $fits = $call =~ /bans/ ? $text eq '1:0' : $text eq '0:';

		is($got->{state}, $fits ? '00000' : 'PT504', "$call gets \"" . substr($text, 0, 20) =~ s/[^ -~]/?/gr . '"') or diag $got->{message};
	}
	is($session->attempt(q{SELECT rl_allow('k', '1/1h')})->{state}, 'PT504', 'rl_allow rejects the text') if $text ne '0';
}
foreach my $host ("a\x1b[31m", "a\nb", "\xff\xfe", 'a b', 'x' x 300)
{
	answer_is('6379 0 ' . length($host) . ":$host");
	$session->ask('SELECT * FROM rl_bans()');
	like($session->error, qr/it does not answer the script/, 'an invalid host');
	unlike($session->error, qr/[^ -~\n]|a$/m, 'the error does not show the host');
}
$session->set(redis_url => undef, command_timeout => undef);

#
# A Cluster
#

my $cluster = RedisCluster->new(masters => 2);
my $third = RedisServer->new(args => [ '--cluster-enabled', 'yes', '--cluster-port', RedisServer::free_port(),
		'--cluster-node-timeout', '1500', '--cluster-require-full-coverage', 'no' ])->start;
$third->{id} = $third->cli('CLUSTER', 'MYID');
push @{ $cluster->{masters} }, $third;
$third->cli('CLUSTER', 'MEET', '127.0.0.1', $cluster->master(0)->port, $cluster->master(0)->cluster_port);
$cluster->await_agreement(3);
$_->cli('ACL', 'SETUSER', $user, @rule, '+asking', @second_rule) foreach $cluster->servers;
$session->set(%as_user, redis_url => $cluster->url(user => $user));
my @everywhere = sort map { "key:$_" } 1 .. 50;
ban($session, @everywhere);
is_deeply(bans($session), \@everywhere, 'the keys of all nodes');

# A lost master without slots has no key.
$third->pause;
await('the loss to be known', sub { return !grep { $_->cli('CLUSTER', 'NODES') !~ /^$third->{id} \S+ \S*master,fail /m } map { $cluster->master($_) } 0, 1; });
is_deeply(bans($session), \@everywhere, 'a lost master without slots is left out');
$third->resume;
await('the third master to be back', sub { return !grep { $_->cli('CLUSTER', 'NODES') =~ /fail/ } $cluster->masters; });

my %moved;
my @crc_table = map {
	my $crc = $_ << 8;
	$crc = $crc << 1 ^ ($crc & 0x8000 ? 0x11021 : 0) foreach 1 .. 8;
	$crc;
} 0 .. 255;
foreach my $case ([ 0, 1 ], [ 1, 0 ], [ 1, 2 ])
{
	my ($from, $to) = @$case;
	my $key = first { !/twin/ && !$moved{$_} && $cluster->has($cluster->master($from), $_) } @everywhere;
	my $slot = $cluster->slot($key);

	# Another key in the slot.
	my $twin = first { slot($_) == $slot } map { "twin:$_" } 1 .. 200_000;
	$moved{$key} = 1;
	@everywhere = sort @everywhere, $twin;
	ban($session, $twin);
	$cluster->begin_move($slot, $from, $to);
	is_deeply(bans($session), \@everywhere, "the slot of $key begins to move from $from to $to");
	$cluster->master($from)->cli('MIGRATE', '127.0.0.1', $cluster->master($to)->port, "rl:{$key}", 0, 10_000);
	is_deeply(bans($session), \@everywhere, 'one of its keys has moved');
	is_deeply(bans(new_session($node, $cluster)), \@everywhere, 'a new session finds the same bans');
	is($session->ask("SELECT state FROM rl_inspect('$_')"), 'ban', "rl_inspect of $_") foreach $key, $twin;
	$cluster->end_move($slot, $from, $to);
	is_deeply(bans($session), \@everywhere, 'the slot has moved');
}

# Several slots at once.
my @travellers = (grep { /^key/ && !$moved{$_} && $cluster->has($cluster->master(0), $_) } @everywhere)[ 0 .. 3 ];
$cluster->begin_move($cluster->slot($_), 0, 1) foreach @travellers;
is_deeply(bans($session), \@everywhere, 'four slots begin to move');
$cluster->master(0)->cli('MIGRATE', '127.0.0.1', $cluster->master(1)->port, "rl:{$_}", 0, 10_000) foreach @travellers[ 0, 1 ];
is_deeply(bans($session), \@everywhere, 'two of their keys have moved');
$cluster->end_move($cluster->slot($_), 0, 1) foreach @travellers;

# Returns the slot of a key: its CRC16 (XMODEM).
sub slot
{
	my ($key) = @_;
	my $crc = 0;

	$crc = ($crc << 8 ^ $crc_table[ $crc >> 8 ^ $_ ]) & 0xffff foreach unpack 'C*', $key;
	return $crc % 16384;
}

# A session that knows nothing of the Cluster.
sub new_session
{
	my ($node, $cluster) = @_;
	my $new = session($node);

	$new->set(%as_user, redis_url => $cluster->url(user => $user, first => 1));
	return $new;
}

$cluster->master(0)->cli('ACL', 'SETUSER', $user, '-cluster');
$cluster->master(1)->cli('ACL', 'SETUSER', $user, '-scan');
like(new_session($node, $cluster)->attempt('SELECT rl_bans()')->{message}, qr/can't run|permission/, 'a node without the rule');
$_->cli('ACL', 'SETUSER', $user, '+cluster', '+scan') foreach $cluster->servers;
$cluster->master(1)->stop;
like($session->attempt('SELECT rl_bans()')->{state}, qr/^PT504/, 'a lost node is an error');
await('the loss to be known', sub { return $cluster->master(0)->cli('CLUSTER', 'NODES') =~ /fail /; });
like($session->attempt('SELECT rl_bans()')->{state}, qr/^PT504/, 'a node that the others know to be lost is an error');

#
# Sentinel
#

my $sentinel = RedisServer->new(args => ['--sentinel'], config => [ 'sentinel monitor service 127.0.0.1 ' . $redis->port . ' 1' ])->start;
$session->set(redis_passfile => undef, redis_url => 'redis+sentinel://127.0.0.1:' . $sentinel->port . '/service');
is_deeply(bans($session), ['ours'], 'the master that a Sentinel names');
is($session->ask(q{SELECT state FROM rl_inspect('ours')}), 'ban', 'rl_inspect of the master that a Sentinel names');

#
# The local store
#

$session->set(redis_url => undef, store => 'local');
$session->ask(q{SELECT count(rl_allow('key:' || n, '1/1h')) FROM generate_series(1, 50000) n});
my $states = $session->ask('SELECT local_keys FROM rl_status()');
is($states, 50_000, '50,000 states');
ban($session, @banned, map { $long . $_ } 1 .. 100);
is($session->ask('SELECT local_keys FROM rl_status()'), 50_000 + $BANNED + 900, 'each ban is a state for each 56 bytes of its key');
is_deeply(bans($session, 'key:%'), \@banned, 'the banned keys');
is($session->ask("SELECT count(*), min(length(key)) FROM rl_bans('x%')"), '100|501', 'the banned long keys');

# A refusal bans long keys too.
my $keys = $session->ask('SELECT local_keys FROM rl_status()');
$session->ask("SELECT rl_allow(repeat('z', 500) || n, '1/1h ban 1h after 1') FROM generate_series(1, 100) n, generate_series(1, 2)");
is($session->ask("SELECT count(*), min(length(key)) FROM rl_bans('z%')"), '100|501', 'the long keys that refusals banned');
is($session->ask('SELECT local_keys FROM rl_status()') - $keys, 1100, 'their bans, with their limits, and their states');
is($session->ask("SELECT count(*) FILTER (WHERE rl_reset(repeat('z', 500) || n)) FROM generate_series(1, 100) n"), 100, 'they are reset');
is($session->ask('SELECT local_keys FROM rl_status()'), $keys, 'their cells are free');

$session->set(key_prefix => 'other:');
is_deeply(bans($session), [], 'none with another prefix');
$session->set(key_prefix => undef);
is($session->ask(q{SELECT count(rl_unban(key)) FROM rl_bans()}), $BANNED + 100, 'the bans end');
is($session->ask('SELECT local_keys FROM rl_status()'), 50_000, 'the cells of the bans are free');

# A ban has the cells that its text needs.
$session->ask(q{SELECT rl_ban(repeat('c', 50), 3600, repeat('r', 128))});
is($session->ask('SELECT local_keys FROM rl_status()'), 50_004, 'a long reason');
$session->ask(q{SELECT rl_ban(repeat('c', 50), 3600, 'short')});
is($session->ask('SELECT local_keys FROM rl_status()'), 50_002, 'a short one in its place');
$session->ask(q{SELECT rl_ban(repeat('c', 50), 3600)});
is($session->ask('SELECT local_keys FROM rl_status()'), 50_001, 'none in its place');
$session->ask(q{SELECT rl_ban(repeat('c', 50), 3600, repeat('r', 128))});
is($session->ask('SELECT rule, reason = repeat(chr(114), 128), rl_unban(key) FROM rl_bans()'), '|t|t', 'a long one again');

# A ban that grows has one more, until its level ends.
$session->ask(q{SELECT rl_unban(key) FROM rl_bans()});
my $before = $session->ask('SELECT local_keys FROM rl_status()');
$session->ask(q{SELECT rl_allow('grows', '1/1h ban 1h to 1d after 1') FROM generate_series(1, 2)});
is($session->ask(q{SELECT string_agg(level || ' ' || rule, '') FROM rl_bans()}), '1 throttle 1/1h ban 1h to 1d after 1', 'the level of a ban that grows');
is($session->ask('SELECT local_keys FROM rl_status()') - $before, 3, 'a state, a ban and its level');
is($session->ask(q{SELECT rl_unban('grows'), rl_unban('grows')}), 't|f', 'rl_unban deletes both');
is($session->ask('SELECT local_keys FROM rl_status()') - $before, 1, 'their cells are free');

# A full store evicts the bans that end first.
$session->ends(q{SELECT count(rl_ban(repeat('y', 400) || n, n)) FROM generate_series(1, 20000) n}, 'more bans than it holds');
is($session->ask(q{SELECT count(*) BETWEEN 12000 AND 13000, min(extract(epoch FROM until - now())) BETWEEN 6300 AND 8300 FROM rl_bans()}), 't|t',
	'the bans that end last are kept') or diag $session->ask(q{SELECT count(*), min(extract(epoch FROM until - now())) FROM rl_bans()});
is($session->ask('SELECT local_keys <= local_max_keys FROM rl_status()'), 't', 'local_keys is at most local_max_keys');

#
# Other encodings
#

$node->safe_psql('postgres', q{CREATE DATABASE latin TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'});
$node->safe_psql('latin', 'CREATE EXTENSION ratelimit');
$session->set(store => undef);
$redis->cli('FLUSHALL');
ban($session, "caf\xc3\xa9", "\xe6\x97\xa5:1", 'plain');
$session->ask("SELECT rl_ban('plain', 3600, 'caf\xc3\xa9'), rl_ban('caf\xc3\xa9', 3600, '\xe6\x97\xa5')");
my $latin = session($node, 'latin');
$latin->ask('SET client_encoding = UTF8');
is_deeply(bans($latin), [ '\xe6\x97\xa5:1', "caf\xc3\xa9", 'plain' ], 'a key is escaped only if the encoding lacks a character');
is_deeply(bans($latin, "caf\xc3\xa9"), ["caf\xc3\xa9"], 'the pattern has the encoding of the database');
is($latin->ask(q{SELECT string_agg(reason, ' ' ORDER BY reason) FROM rl_bans()}), "\\xe6\\x97\\xa5 caf\xc3\xa9", 'and a reason');
is($latin->ask(q{SELECT substr(raw, 35) FROM rl_inspect('plain')}), "reason caf\xc3\xa9", 'rl_inspect too');
$latin->ask(q{SELECT rl_ban('latin', 3600, 'caf' || chr(233))});
is($session->ask(q{SELECT reason FROM rl_bans('latin')}), "caf\xc3\xa9", 'a reason is kept in UTF-8');
is_deeply(bans($latin, 'caf_'), ["caf\xc3\xa9"], '_ is a character of the key');
is_deeply(bans($latin, '__1'), ['\xe6\x97\xa5:1'], '_ matches a character that the encoding lacks');
is($latin->ask(q{SELECT rl_unban('caf' || chr(233))}), 't', 'the ban of such a key ends');

done_testing();
