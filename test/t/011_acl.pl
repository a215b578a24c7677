# The smallest rule for a user of Redis, as docs/operations.md shows it.  Every
# function works under it, each of its words is necessary, and keys with another
# prefix are not accessible.
#
# Runs once with a server: the server checks privileges.
use RatelimitTest;
use RedisServer qw(documented_user);

my ($user, $password, @rule) = documented_user();
my @commands = grep { /^\+/ } @rule;
is_deeply([ grep { !/^\+[a-z]+$/ } @rule ], [ 'on', ">$password", '~rl:*' ],
	'the documented rule: one prefix, and single commands');

my $redis = RedisServer->new(password => 'sesame')->start;
my $node = shared_node($redis, 'track_functions = all', 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0',
	"ratelimit.redis_passfile = '" . password_file($password) . "'",
	"ratelimit.redis_url = '" . $redis->url(user => $user, tcp => 1) . "'");
$node->safe_psql('postgres', q{
	CREATE TABLE orders (customer bigint);
	CREATE TRIGGER enforce BEFORE INSERT ON orders
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '3/1d, sliding_log 5/1h');
	CREATE FUNCTION refund_in_transaction() RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM rl_check('refund', 'sliding_log 9/1h refund_on_abort');
		BEGIN
			PERFORM rl_check('refund', 'sliding_log 9/1h refund_on_abort', 2);
			RAISE 'refund';
		EXCEPTION WHEN raise_exception THEN
			-- A refund that Redis does not permit is only logged.
			IF (SELECT remaining FROM rl_peek('refund', 'sliding_log 9/1h', 0)) <> 8 THEN
				RAISE 'not refunded because a permission is missing' USING ERRCODE = 'PT504';
			END IF;
			RETURN 'refunded';
		END;
	END $$;
	CREATE FUNCTION taken_and_refunded(keys text[]) RETURNS bigint LANGUAGE plpgsql AS $$
	DECLARE
		taken bigint;
	BEGIN
		BEGIN
			SELECT count(*) FILTER (WHERE source = 'redis') INTO taken FROM rl_check_many(keys, 'fixed_window 100/3650d refund_on_abort');
			RAISE 'refund';
		EXCEPTION WHEN raise_exception THEN
		END;
		-- The refunds are sent ahead of this.
		PERFORM rl_check('other', '1/1s');
		RETURN 0;
	END $$;
});
my $session = session($node);

# Calls that together make Redis run every command of the scripts: first and later
# actions, refusals, bans, entries that a refund splits, deleted states.
my $five = '3/1h, token_bucket 3/1h, fixed_window 3/1h, sliding_window 3/1h, sliding_log 3/1h';
my $log = 'sliding_log 4/1h';
my @calls = (
	(map { ("SELECT $_", "SELECT $_") } q{rl_throttle('k', 1, 1, 3600)}, q{rl_token_bucket('k', 1, 1, 3600)},
		q{rl_fixed_window('k', 1, 3600)}, q{rl_sliding_window('k', 1, 3600, 60)}, q{rl_sliding_log('k', 1, 3600)}),
	(map { "SELECT rl_throttle('busy', 1000, 1000, 3600, $_)" } 100, 1),
	"SELECT rl_check('five', '$five', 2)", "SELECT rl_check('five', '$five', 2)",
	(map { ("SELECT rl_check('$_', '$_ 1/1h ban 1h after 2')") x 3 }
		qw(throttle token_bucket fixed_window sliding_window sliding_log)),
	(map { ("SELECT rl_check('$_ denied', '$_ 4/1h count_denied', 3)") x 2 }
		qw(fixed_window sliding_window sliding_log)),
	("SELECT rl_check('log', '$log')") x 4, "SELECT rl_check('log', '$log', 3)",
	"SELECT rl_refund('log', '$log', 2)", "SELECT rl_check('log', '$log', 2)",
	"SELECT rl_refund('log', '$log', 3)", "SELECT rl_refund('five', '$five', 1)",
	(map { "SELECT $_('$_', '$five')" } qw(rl_check_each rl_allow rl_enforce rl_wait rl_peek)),
	"SELECT count(*) FROM rl_check_many('{a,b,a}', '$five')",
	(map { "SELECT count(*) FROM $_('{$_ 1,$_ 2}', ARRAY['$five', '$log']::rl_limits[])" } qw(rl_check_all rl_enforce_all)), 'SELECT refund_in_transaction()',
	'INSERT INTO orders VALUES (42), (42)', q{SELECT problem FROM rl_triggers},
	q{SELECT rl_network('10.0.0.1')}, q{SELECT rl_ban(rl_key('k', 1), 3600)}, q{SELECT rl_unban('k:1')}, q{SELECT rl_unban(rl_key(VARIADIC '{k,1}'::text[]))},
	"SELECT count(rl_check('leased', 'fixed_window 1000/1h lease 1s', n / n)) FROM generate_series(1, 20) n",
	"SELECT rl_reserve('held', '$five, concurrent 3/1h', 1, 'a')", q{SELECT rl_extend('held', 'a')}, q{SELECT rl_settle('held', 'a', 2)},
	"SELECT rl_reserve_all('{held,held:2}', ARRAY['$five', 'concurrent 3/1h']::rl_limits[], '{1}', 'b')", q{SELECT rl_extend_all('{held,held:2}', 'b')}, q{SELECT rl_settle_all('{held,held:2}', 'b', '{2}')},
	(map { "SELECT rl_settle('held', 'a', 1), rl_extend('held', '$_'), rl_reset('held', '$five')" } qw(a b)),
	"SELECT rl_reset('five', '$five')", q{SELECT rl_reset('log')}, q{SELECT rl_reset('log')},
	(map { "SELECT count(*) FROM $_" } qw(rl_stat rl_denied)), 'SELECT rl_stat_reset()');

# Gives the user only this rule, and deletes all keys and scripts.
sub with_rule
{
	my (@words) = @_;

	$redis->cli('ACL', 'DELUSER', $user);
	$redis->cli('ACL', 'SETUSER', $user, @words);
	$redis->cli('FLUSHALL');
	$redis->cli('SCRIPT', 'FLUSH');
	return;
}

# Makes all calls; returns the errors.
sub failures
{
	return map { "$_->{state} $_->{message}: $_->{detail}" }
	  grep { $_->{state} ne '00000' } map { $session->attempt($_) } @calls;
}

with_rule(@rule);
is_deeply([ failures() ], [], 'every function works under the rule');
like($redis->cli('CLIENT', 'LIST'), qr/user=\Q$user\E /, 'it is that user');
like($session->ask(q{SELECT version, error IS NULL FROM rl_status()}), qr/\d+\.\d+.*\|t$/, 'rl_status too');
$session->ask('SELECT pg_stat_force_next_flush()');
is($node->safe_psql('postgres', q{
		SELECT string_agg(oid::regprocedure::text, ', ' ORDER BY oid)
		FROM pg_proc LEFT JOIN pg_stat_user_functions s ON s.funcid = oid
		WHERE s.calls IS NULL AND proname NOT LIKE 'rl\_limits%' AND proname NOT IN ('rl_simulate', 'rl_headers', 'rl_bans', 'rl_bans_found', 'rl_inspect')
			AND oid IN (} . members('pg_proc') . ')'),
	'', 'every function was called, except those that do not use Redis, and those of the second rule (081_bans)');

foreach my $left_out (@rule)
{
	with_rule(grep { $_ ne $left_out } @rule);
	my @failures = failures();

	cmp_ok(scalar @failures, '>', 0, "without $left_out a call fails");
	is_deeply([ grep { !/^PT504 .*(?:can't run|permission|WRONGPASS)/ } @failures ], [],
		"without $left_out: the errors are permissions that are missing, not verdicts");
}

#
# An error says that nothing was charged or refunded, and an answer that it was, once
#

# It sees what the user's call has done.
my $admin = session($node);
$admin->set(redis_passfile => password_file('sesame'), redis_url => $redis->url);

my ($seconds, $us) = @{ $redis->cli('TIME') };
my $now = sprintf '%d%06d', $seconds, $us;
my $all = join ', ', map { "$_ 100/3650d" } qw(throttle token_bucket fixed_window sliding_window sliding_log);

# Returns the SQL of the units that are in use of these keys.
sub used
{
	my ($limits, @keys) = @_;

	return 'SELECT ' . join ' + ', map { "(SELECT sum(capacity - remaining) FROM rl_peek('$_', '$limits', 0))" } @keys;
}

# What; its limits; its keys; the call, which returns how many units it takes (less than 0: how many
# it refunds); and before it fields of the first key, or a call of another user.
my @cases = (
	(map { [ "$_, a new key", "$_ 100/3650d", ['new'], "SELECT allowed::int FROM rl_check('new', '$_ 100/3650d')" ] }
		split / 100\/3650d,? ?/, $all),
	(map { [ "$_, another state", "$_ 100/3650d", ['k'], "SELECT allowed::int FROM rl_check('k', '$_ 100/3650d')" ] }
		split / 100\/3650d,? ?/, $all),
	[ 'several limits', $all, ['k'], "SELECT 5 * allowed::int FROM rl_check('k', '$all')" ],
	[ 'a limit with a ban', 'fixed_window 100/3650d', ['k'], q{SELECT allowed::int FROM rl_check('k', 'fixed_window 100/3650d ban 1d after 1')} ],
	# These chunks are deleted behind the charge.
	[ 'a log with chunks that are free', 'sliding_log 100/3650d', ['k'], q{SELECT allowed::int FROM rl_check('k', 'sliding_log 100/3650d')},
		[ 'sliding_log:315360000000000', "1 0 3 0 0 3 ${now}000001", map { ("sliding_log:315360000000000:$_", 'x') } 0 .. 2 ] ],
	[ 'many throttles', 'throttle 100/3650d', [ 'a' .. 'd' ], q{SELECT count(*) FILTER (WHERE source = 'redis') FROM rl_check_many('{a,b,c,d}', '100/3650d')} ],
	[ 'many windows', 'fixed_window 100/3650d', [ 'a' .. 'd' ], q{SELECT count(*) FILTER (WHERE source = 'redis') FROM rl_check_many('{a,b,c,d}', 'fixed_window 100/3650d')} ],
	[ 'a key of several', $all, [qw(a b)], "SELECT 5 * count(*) FROM rl_check_all('{a,b}', '{\"$all\",\"$all\"}')" ],
	[ 'a reservation', 'fixed_window 100/3650d', ['k'], q{SELECT allowed::int FROM rl_reserve('k', 'fixed_window 100/3650d', 1, 'new')} ],
	[ 'a reservation of a log', 'sliding_log 100/3650d', ['k'], q{SELECT allowed::int FROM rl_reserve('k', 'sliding_log 100/3650d', 1, 'new')} ],
	(map { [ "a settlement, $_", $_, ['k'], q{SELECT -5 * rl_settle('k', 'old', 2)::int}, "SELECT rl_reserve('k', '$_', 7, 'old')" ] }
		'fixed_window 100/3650d', 'sliding_log 100/3650d'),
	(map { [ "rl_refund, $_ of 5", $all, ['k'], "SELECT -5 * least($_, 5) FROM rl_refund('k', '$all', $_)", "SELECT rl_check('k', '$all', 5)" ] } 2, 9),
	[ 'a rollback', 'fixed_window 100/3650d', [ 'a' .. 'd' ], q{SELECT taken_and_refunded('{a,b,c,d}')},
		q{SELECT count(*) FROM rl_check_many('{a,b,c,d}', 'fixed_window 100/3650d', '{5,5,5,5}')} ]);

foreach my $left_out (@commands)
{
	my @wrong;

	foreach my $case (@cases)
	{
		my ($what, $limits, $keys, $call, @before) = @$case;

		# As after another use: the expiry is too early, and states have ended.
		with_rule(grep { $_ ne $left_out } @rule);
		$redis->cli('HSET', "rl:{$_}", 'expiry', 1, 'fixed_window:1000', '1000 1') foreach grep { $_ ne 'new' } @$keys;
		$redis->cli('HSET', "rl:{$keys->[0]}", @{ $before[0] }) if ref $before[0];
		$admin->ask($before[0]) if $before[0] && !ref $before[0];
		my $before = $admin->ask(used($limits, @$keys));
		my $got = $session->attempt($call);
		my $more = $admin->ask(used($limits, @$keys)) - $before;
		# What a rollback cannot refund is logged.
		push @wrong, "$what: $more more in use, answer '$got->{answer}' $got->{message}"
		  unless $what eq 'a rollback' ? $more >= 0 && $more <= 4 : $more == ($got->{answer} || 0);
	}
	is_deeply(\@wrong, [], "without $left_out: charged, or an error");
}

#
# Keys with another prefix
#

with_rule(@rule);
foreach my $prefix ('other:', 'rl', '')
{
	$session->set(key_prefix => $prefix);
	foreach my $call (q{rl_throttle('k', 1, 1, 3600)}, "rl_check('k', '$five')", q{rl_ban('k', 3600)}, q{rl_reset('k')})
	{
		$session->fails("SELECT $call", "the prefix '$prefix': $call", 'PT504', qr/NOPERM .* key/);
	}
}
is_deeply($redis->cli('KEYS', '*'), [], 'Redis has no key');
$session->set(key_prefix => undef);
is($session->attempt($calls[0])->{state}, '00000', 'with its own prefix the call works');

# The page says when the user also needs +select.
like(slurp_file("$FindBin::RealBin/../../docs/operations.md"), qr/`\+select`/, 'the page names +select');
$session->set(redis_url => $redis->url(user => $user, db => 1));
is($session->attempt($calls[0])->{state}, 'PT504', 'another database than 0 needs +select');
with_rule(@rule, '+select');
is_deeply([ failures() ], [], 'with +select every function works');

done_testing();
