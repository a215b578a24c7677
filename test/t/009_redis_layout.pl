# The layout in Redis: a hash for each key, with a time to live at all times.  No
# verdict depends on a missing key.
#
# Runs once with a server: it reads what the server stores.
use RatelimitTest;
use Digest::SHA qw(sha1_hex sha256_hex);
use Engines qw(seed all_seeds reseed);

my $seed = seed();
my ($redis, $node, $session) = start_servers(\&new_node);

# The documented layout, which other programs may read.
$session->ask(q{SELECT rl_check('k', '10/1min, 100/1.5h burst 3'); SELECT rl_ban('k', 2.5)});
is($redis->cli('TYPE', 'rl:{k}'), 'hash', 'a key is a hash');
my %fields = @{ $redis->cli('HGETALL', 'rl:{k}') };
my ($s, $us) = @{ $redis->cli('TIME') };
my $now = $s * 1_000_000 + $us;
is_deeply([ sort keys %fields ], [ 'ban', 'expiry', 'throttle:5400000000', 'throttle:60000000' ],
	'the hash has a field for each limit, a field for the ban, and its expiry');
is($redis->cli('PEXPIRETIME', 'rl:{k}'), $fields{expiry}, 'the field has the expiry, in milliseconds');
foreach my $case ([ 'throttle:60000000', 6_000_000, 1000 ], [ 'throttle:5400000000', 54_000_000, 1000 ],
	[ 'ban', 2_500_000, 1 ])
{
	my ($field, $ahead, $unit) = @$case;

	like($fields{$field}, $field eq 'ban' ? qr/^\d+ \d+$/ : qr/^\d+$/, "$field: decimal numbers");
	$fields{$field} =~ s/ .*//;
	my $late = $now + $ahead - $fields{$field} / $unit;
	cmp_ok(abs($late), '<', 10_000_000, "$field: a time since 1970, in its unit");
	cmp_ok($late, '>=', -1, "$field: a time that was set before it was read");
}

# A user can read and run what Redis gets.
{
	my $script = qx('$FindBin::RealBin/../../script/lua' check);

	is_deeply($redis->cli('SCRIPT', 'EXISTS', sha1_hex($script)), [1], 'script/lua prints the script that Redis has');
	unlike($script, qr/^(?: |--)/m, 'without comments and indents');
}

# A ban has its end, its beginning, and the limit that set it or the reason of rl_ban.
$session->set(debug_now => '1700000000000000');
$session->ask(q{SELECT rl_ban('why', 60, 'ticket 7'); SELECT rl_allow('why:2', '1/1h ban 1h after 2') FROM generate_series(1, 3)});
is($redis->cli('HGET', 'rl:{why}', 'ban'), '1700000060000000 1700000000000000 reason ticket 7', 'a ban with a reason');
is($redis->cli('HGET', 'rl:{why:2}', 'ban'), '1700003600000000 1700000000000000 limit throttle 1/1h ban 1h after 2', 'a ban that a limit set');
$session->ask(q{SELECT rl_allow('why:3', '1/1h ban 1h to 1d after 2') FROM generate_series(1, 3)});
is_deeply($redis->cli('HMGET', 'rl:{why:3}', 'ban', 'ban:level'),
	[ '1700003600000000 1700000000000000 limit throttle 1/1h ban 1h to 1d after 2', '1700007200000000 3600000000' ], 'a ban that grows');

# A later release must know the action and the limits of a reservation.  The hash of several keys is SHA-256, that of the
# limits SipHash-2-4-128 with a secret of zeros; both are the same on each machine.  Of one key, the action is the hash
# of the limits, and a retry compares the quota, too.
sub hash_of { return substr sha256_hex(join '', @_), 0, 32 }
$session->ask(q{SELECT rl_reserve('why:4', '10/1h, concurrent 3/1min', 2, 'job')});
my $born = $redis->cli('HGET', 'rl:{why:4}', 'born');
is($redis->cli('HGET', 'rl:{why:4}', 'reserved:job'), '1700000060000000 60000000 open 2 887f63b7377ff66b'
	. " 1 1700000000000000\n2 887f63b7377ff66b\nthrottle:3600000000 360000000 0 2 0 $born\nconcurrent:60000000 3 0 1 1700000000000000 $born", 'a reservation');
$session->ask(q{SELECT rl_reserve_all('{why:4,why:5,why:6}', '{"10/1h, concurrent 3/1min",unlimited,fixed_window 9/1h}', '{2,1,3}', 'job')});
like($redis->cli('HGET', 'rl:{why:6}', 'reserved:job'), qr/^1700000060000000\ 60000000\ open\ 3\ ${\hash_of('5:why:45:why:55:why:6', ' 2 throttle 10\/1h, concurrent 3\/1min', ' 1 unlimited', ' 3 fixed_window 9\/1h')}
	\ 3:${\hash_of('5:why:45:why:55:why:6')}\ 1700000000000000\n2\ 887f63b7377ff66b\nthrottle:3600000000\ 360000000\ 0\ 2\ 0\ $born\nconcurrent:60000000\ 3\ 0\ 1\ 1700000000000001\ $born
	\n0\ \w{16}\n3\ \w{16}\nfixed_window:3600000000\ 9\ 0\ 3\ 1699999200000000\ \d+$/x, 'a reservation on several keys');
is($session->ask(q{SELECT rl_settle_all('{why:4,why:5,why:6}', 'job', '{2,1,5}')}), 't', 'which is settled');
like($redis->cli('HGET', 'rl:{why:6}', 'reserved:job'), qr/^1700000060000000 60000000 settled:5 3 \w{32} 3:\w{32} 1700000000000000$/, 'has no charges any more');
$session->set(debug_now => undef);

# A state that has ended is as if never used, although it is still stored.
$redis->cli('HSET', 'rl:{old}', 'throttle:60000000', '1000000000', 'ban', '1000000');
$redis->cli('PEXPIRE', 'rl:{old}', 3_600_000);
is($session->ask(q{SELECT * FROM rl_throttle('old', 10, 10, 60)}), 't|10|9||6|throttle 10/1min|redis', 'an old state is as if never used');

# The next write sets the time to live of a key that has none.  It is long enough for
# all states of the key.  Before the write, the key's state counts too.
foreach my $write (q{SELECT rl_throttle('bare', 10, 10, 60)}, q{SELECT rl_check('bare', '10/1min, 1/1s')},
	q{SELECT rl_refund('bare', '10/1min', 1)}, q{SELECT rl_ban('bare', 5)}, q{SELECT rl_throttle('bare', 1, 1, 1)})
{
	$redis->cli('DEL', 'rl:{bare}');
	($s, $us) = @{ $redis->cli('TIME') };
	$redis->cli('HSET', 'rl:{bare}', 'throttle:60000000', ($s + 18) . '000000000');
	is($redis->cli('PTTL', 'rl:{bare}'), -1, 'a key without a time to live');
	is($session->ask(q{SELECT remaining < 9 FROM rl_peek('bare', '10/1min', 0)}), 't', 'the state of a key without a time to live counts');
	is($session->attempt($write)->{state}, '00000', $write);
	cmp_ok($redis->cli('PTTL', 'rl:{bare}'), '>', 11_000, 'the write sets a time to live that is long enough');
}

# Calls that only look write no key and no expiry.
$redis->cli('FLUSHDB');
foreach my $call (q{rl_peek('looked', '10/1min')}, q{rl_throttle('looked', 10, 10, 60, 0)},
	q{rl_throttle('looked', 10, 10, 60, 11)}, q{rl_check('looked', '10/1min, 1/1s', 0)},
	q{rl_check('looked', '10/1min, 1/1s', 2)}, q{rl_refund('looked', '10/1min', 1)},
	q{rl_reset('looked', '10/1min')}, q{rl_reset('looked')}, q{rl_unban('looked')})
{
	is($session->attempt("SELECT $call")->{state}, '00000', $call);
	is_deeply($redis->cli('KEYS', '*'), [], 'the call writes nothing');
}
$session->ask(q{SELECT rl_throttle('looked', 1, 1, 3600)});
$redis->cli('PEXPIRE', 'rl:{looked}', 7_000_000);
my $dump = $redis->cli('DUMP', 'rl:{looked}');
$session->ask(q{SELECT rl_peek('looked', '1/1h'); SELECT rl_throttle('looked', 1, 1, 3600);
	SELECT rl_throttle('looked', 1, 1, 3600, 0); SELECT rl_check('looked', '1/1h, 5/1min')});
is($redis->cli('DUMP', 'rl:{looked}'), $dump, 'a refusal writes nothing');
cmp_ok($redis->cli('PTTL', 'rl:{looked}'), '>', 6_000_000, 'a refusal does not change the expiry');

# Random actions and bans: the time to live is right after each step.
$redis->cli('FLUSHDB');
my @problems;
my %ran;
my @limits = ('10/1s', '5/10ms', '100/1min burst 500', '3/1h', '1/30d burst 4', '7/1us', '2/10s, 9/1d',
	'1000000/1s burst 3, 1/1min, 2/3650d');
my $steps = all_seeds(400, 10);
foreach my $step (1 .. $steps)
{
	reseed($step - 1, $steps);
	my $key = 'random:' . int(rand(6));
	my $quota = int(rand(4));
	my $limits = $limits[ rand @limits ];
	my $what = (qw(check check check check ban look))[ rand 6 ];

	# Each ban is longer than the ban before, because a time to live never shrinks.
	my $sql = $what eq 'check' ? "SELECT rl_check('$key', '$limits', $quota)"
	  : $what eq 'ban' ? "SELECT rl_ban('$key', " . 0.001 * $step . ')'
	  : "SELECT rl_peek('$key', '$limits')";
	my $got = $session->attempt($sql);
	push @problems, "$sql: $got->{message}" if $got->{state} ne '00000';
	push @problems, map { "after $sql: $_" } ttl_problems($redis);
	$ran{$what}++;
}
is_deeply(\@problems, [], "each key has a right time to live after each of $steps steps")
  or diag "repeat with RATELIMIT_SEED=$seed";
cmp_ok($ran{$_}, '>', 10, "$_: $ran{$_}") foreach qw(check ban look);

# A call that shrinks a state keeps a time to live that is long enough.
foreach my $sql (map { my $key = "random:$_"; map { sprintf $_, $key } q{SELECT rl_refund('%s', '1/30d burst 4', 1)},
	q{SELECT rl_unban('%s')}, q{SELECT rl_reset('%s', '3/1h')}, q{SELECT rl_ban('%s', 0.5)},
	q{SELECT rl_refund('%s', '100/1min burst 500', 500)} } 0 .. 5)
{
	is($session->attempt($sql)->{state}, '00000', $sql);
	foreach my $key (@{ $redis->cli('KEYS', '*') })
	{
		cmp_ok($redis->cli('PTTL', $key), '!=', -1, "$key has a time to live");
	}
	is_deeply([ grep { /lives (\S+) ms, its state (\S+) ms/ && $1 < $2 } ttl_problems($redis) ], [],
		'each time to live is long enough');
}

# Virtual time does not pass by itself, so such keys live for at least an hour.
$redis->cli('FLUSHDB');
$session->ask(q{SET ratelimit.debug_now = '1000000000000000'; SELECT rl_throttle('virtual', 10, 10, 1);
	SELECT rl_ban('banned', 1)});
cmp_ok($redis->cli('PTTL', $_), '>', 3_500_000, "virtual time: $_") foreach 'rl:{virtual}', 'rl:{banned}';

# A call that only deletes fields also repairs an expiry that another program has changed.
$session->ask('RESET ratelimit.debug_now');
foreach my $change ([ 'PERSIST' ], [ 'PEXPIRE', 5000 ])
{
	foreach my $call (q{rl_refund('changed', 'sliding_log 5/1h', 1)}, q{rl_refund('changed', 'fixed_window 9/2h from_first', 1)},
		q{rl_unban('changed')}, q{rl_reset('changed', 'sliding_log 5/1h')})
	{
		$redis->cli('DEL', 'rl:{changed}');
		$session->ask(q{SELECT rl_check('changed', 'sliding_log 5/1h, fixed_window 9/2h from_first, 9/3h'), rl_ban('changed', 3600)});
		my ($command, @time) = @$change;
		$redis->cli($command, 'rl:{changed}', @time);
		$session->ask("SELECT $call");
		is($redis->cli('PEXPIRETIME', 'rl:{changed}'), $redis->cli('HGET', 'rl:{changed}', 'expiry'), "$call after $command");
	}
}

# Writes delete states that have ended, whichever limits a call has, and no others.
# In virtual time they are kept for 11 years.
my $start = 1_700_000_000_000_000;
my $years = 347_133_600_000_000;
my $used = 'fixed_window 1000/30d from_first';

# Returns calls, each a microsecond after the one before.
sub calls
{
	my ($n, $at, $limits) = @_;
	return "SELECT count(rl_check('swept', '$limits', length(set_config('ratelimit.debug_now', ($at + n)::text, false)) / 16))
		FROM generate_series(1, $n) n;";
}

# Makes states of all kinds, whose periods have this unit.
sub make_states
{
	my ($unit, $calendar, $at) = @_;
	my $rolled_back = "sliding_log 1000/14$unit refund_on_abort";

	$session->ends("SET ratelimit.debug_now = '$at';" . calls(1, $at, "$calendar, 100/1$unit, token_bucket 9/2$unit, fixed_window 9/3$unit")
		. calls(1, $at, "sliding_window 9/4$unit, sliding_log 9/5$unit, concurrent 9/7$unit")
		. calls(3, $at, "1/8$unit ban 1$unit after 9, sliding_log 2/9$unit count_denied shadow, fixed_window 1/11$unit from_first shadow")
		. calls(300, $at, "sliding_log 1000/12$unit") . calls(200, $at, "sliding_log 100/13$unit count_denied")
		. calls(64, $at, $rolled_back) . 'BEGIN;' . calls(1, $at, $rolled_back) . 'ROLLBACK', "states that end after some $unit");
	return;
}

sub swept { return { @{ $redis->cli('HGETALL', 'rl:{swept}') } } }

foreach my $way ('the expiry is set', 'a field is new', 'a field is new, one of two keys')
{
	my $calls = 0;
	my $call = sub {
		my ($at) = @_;
		my $limits = $way eq 'the expiry is set' ? $used : 'fixed_window 9/' . (100 + ++$calls) . 'h from_first';

		# The fields that a call looks at are random, so their number must stay small.
		$redis->cli('HDEL', 'rl:{swept}', 'fixed_window:' . (99 + $calls) * 3_600_000_000 . ':first') if $calls > 1;
		$redis->cli('PEXPIRE', 'rl:{swept}', 1_000_000) if $way eq 'the expiry is set';
		$session->ask("SET ratelimit.debug_now = '$at'; "
			. ($way =~ /two/ ? "SELECT count(*) FROM rl_check_all('{swept,beside}', ARRAY['$limits', '1000/1s']::rl_limits[])"
				: "SELECT rl_check('swept', '$limits')"));
		return;
	};

	$redis->cli('FLUSHDB');
	make_states('s', 'fixed_window 9/day in Asia/Tokyo', $start);
	my @ended = grep { !/^(expiry|born)$/ } keys %{ swept() };
	cmp_ok(scalar @ended, '>=', 20, 'many states');
	$call->($start + $years) foreach 1 .. 3;
	is_deeply([ grep { !exists swept()->{$_} } @ended ], [], 'states are kept until they end');
	$redis->cli('HSET', 'rl:{swept}', 'ban', $start + 1_000_000, 'ban:level', $start + 1_000_000 . ' 500000');
	push @ended, 'ban', 'ban:level';
	make_states('h', 'fixed_window 9/year in Asia/Tokyo', $start + $years);
	$redis->cli('HSET', 'rl:{swept}', 'another', '1', 'throttle:x', '1', 'fixed_window:9', 'x', 'sliding_log:1:7', '', 'sliding_log:2', '');
	my %live = %{ swept() };
	delete @live{ 'expiry', @ended, grep { /:first$/ } keys %live };

	# The last state but that of the day ends after 14 seconds; the day is kept for two days more.
	my @days = grep { /day/ } @ended;
	my $gone = sub { my ($fields) = (swept()); return !grep { exists $fields->{$_} } @_ };
	foreach (1 .. 500)
	{
		$call->($start + $years + 15_000_100);
		last if $gone->(grep { !/day/ } @ended);
	}
	my $fields = swept();
	is_deeply([ sort grep { exists $fields->{$_} } @ended ], \@days, "$way: the ended states are deleted");
	is_deeply([ grep { ($fields->{$_} // '') ne $live{$_} } sort keys %live ], [], 'the others are kept');
	foreach (1 .. 400)
	{
		$call->($start + $years + 4 * 86_400_000_000);
		last if $gone->(@days);
	}
	ok($gone->(@days), 'the state of a day is deleted two days after its end');
}

# The same in real time.
$session->ask(q{RESET ratelimit.debug_now; SELECT count(rl_check('real', format('token_bucket 1/%sus, sliding_log 1/%sus', n, n)::rl_limits))
	FROM generate_series(1, 100) n; SELECT rl_check('real', 'fixed_window 1000000/30d from_first')});
await('the end of the states', sub {
	$redis->cli('PEXPIRE', 'rl:{real}', 1_000_000);
	$session->ask(q{SELECT rl_check('real', 'fixed_window 1000000/30d from_first')});
	return $redis->cli('HLEN', 'rl:{real}') == 2;
});

done_testing();
