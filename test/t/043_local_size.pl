# The local store at large sizes: exhausted keys stay refused while logs grow, a store
# of n keys holds n keys, and no call makes other calls wait for long.
#
# Runs once: the store's tables are C only, and 040_local_store uses them in each row.
use RatelimitTest;

# There is no server behind the URL.
my $node = shared_node(RedisServer->new, 'ratelimit.store = local', 'jit = off');
my $session;

sub restart
{
	my ($max_keys) = @_;

	$session->quit if $session;
	$node->append_conf('postgresql.conf', "ratelimit.local_max_keys = $max_keys");
	start_node($node, 'restart');
	$session = session($node);
	$session->ask("SET ratelimit.debug_now = '1700000000000000'");
	is($session->ask('SELECT local_keys, local_max_keys, local_entries FROM rl_status()'), "0|$max_keys|0", "a store of $max_keys keys");
	return;
}

sub answers { return $session->answers(@_); }

$node->safe_psql('postgres', q{
	-- Makes n calls, a microsecond apart, so that each makes an entry; returns how many
	-- calls were allowed.
	CREATE FUNCTION take(key text, limits rl_limits, n bigint) RETURNS bigint LANGUAGE plpgsql AS $$
	DECLARE
		now bigint := current_setting('ratelimit.debug_now');
		allowed bigint := 0;
	BEGIN
		FOR i IN 1 .. n LOOP
			PERFORM set_config('ratelimit.debug_now', (now + i)::text, false);
			allowed := allowed + rl_allow(key, limits)::int;
		END LOOP;
		RETURN allowed;
	END $$;
	-- Exhausts 20,000 customers; exhausted() returns how many of them are refused.
	CREATE FUNCTION exhaust() RETURNS bigint LANGUAGE sql
		RETURN (SELECT sum(take('customer:' || n, 'sliding_log 20/1d', 1 + i * 0)) FROM generate_series(1, 20) i, generate_series(1, 20000) n);
	CREATE FUNCTION exhausted() RETURNS bigint LANGUAGE sql
		RETURN (SELECT count(*) FILTER (WHERE NOT p.allowed)
			FROM generate_series(1, 20000) n, LATERAL rl_peek('customer:' || n, 'sliding_log 20/1d') p);
});

#
# Exhausted keys while logs grow, in the long form only
#

if (is_long())
{
	restart(100_000);
	answers('SELECT exhaust()', 400_000, '20,000 customers use up their quota');
	answers('SELECT exhausted()', 20_000, 'all customers are refused');
	my ($entries, $most) = split /\|/, $session->ask('SELECT local_entries, local_max_entries FROM rl_status()');
	ok($entries >= 400_000 && $entries <= $most, "rl_status: $entries of $most entries");
	answers(q{SELECT take('big', 'sliding_log 100000/1d', 70000)}, 70_000, 'a log grows to 70,000 entries');
	cmp_ok($session->ask('SELECT exhausted()'), '>=', 19_900, 'the customers are still refused');
	answers(q{SELECT rl_reset('big')}, 't', 'rl_reset deletes the log');
	answers('SELECT exhaust() < 2000', 't', 'few customers have quota again, and they use it up');
	my $seven = join ', ', map { "sliding_log 100000/${_}h" } 25 .. 31;
	answers("SELECT take('big', '$seven', 10000)", 10_000, 'seven logs grow to 10,000 entries');
	cmp_ok($session->ask('SELECT exhausted()'), '>=', 19_900, 'the customers are still refused');
}

#
# As many keys as there is room for
#

restart(100_000);
answers(q{SELECT count(*) FILTER (WHERE rl_allow('key:' || n, '1/1d')) FROM generate_series(1, 100000) n}, 100_000, '100,000 keys are allowed');
answers(q{SELECT count(*) FILTER (WHERE rl_allow('key:' || n, '1/1d')) FROM generate_series(1, 100000) n}, 0, 'no key was evicted');
answers('SELECT local_keys FROM rl_status()', 100_000, '100,000 states are stored');

#
# One key with as many reservations as a key can have
#
# Each has eight limits and an id of 128 bytes, and so the most states.  Other keys' states
# stay while there are free ones.
#

my $budgets = join ', ', map { "fixed_window 1000000/${_}d from_first" } 1 .. 8;
my $reserve = "rl_reserve('tenant', '$budgets', 1, lpad(n::text, 128, 'i'), 86400)";

restart(63_000);
answers("SELECT count(*) FILTER (WHERE r.allowed) FROM generate_series(1, 4096) n, $reserve r", 4096, 'a key gets 4,096 reservations');
$session->fails("SELECT $reserve FROM generate_series(4097, 4097) n", 'and one more', '54000', qr/reservations/);
answers(q{SELECT count(*) FILTER (WHERE rl_allow('login:' || n, '3/1d')) FROM generate_series(1, 500) n, generate_series(1, 3)}, 1500, '500 other keys use up their quota');
answers(q{SELECT count(*) FILTER (WHERE rl_allow('login:' || n, '3/1d')) FROM generate_series(1, 500) n}, 0, 'and are refused then');
answers('SELECT local_evicted, local_keys > 61500 FROM rl_status()', '0|t', 'no state was evicted from a store that is nearly full');
my $settled = is_long() ? 4096 : 512;
answers("SELECT count(*) FILTER (WHERE rl_settle('tenant', lpad((n * 4096 / $settled)::text, 128, 'i'), 0)) FROM generate_series(1, $settled) n", $settled, "$settled reservations are settled");
answers("SELECT DISTINCT remaining FROM rl_peek('tenant', '$budgets', 0)", 1_000_000 - 4096 + $settled, 'and their quota is free');

#
# The duration of calls
#

# Returns the processor time in milliseconds that the backend uses for a statement.
sub processor_ms
{
	my ($sql) = @_;
	my ($ms) = $session->timed($sql);

	die "$sql: " . $session->error if $session->error !~ /^$|has too many reservations/;
	return $ms;
}

# Returns the processor time of the longest statement.
sub longest
{
	my (@sql) = @_;
	return max(map { processor_ms($_) } @sql);
}

# Checks the bound of 5 ms with a margin, because a slow processor needs some of it.  Measures
# again if the time is above it, because other work of the processor displaces its caches.
sub is_short
{
	my ($name, $measure) = @_;
	my @ms = map { sprintf '%.2f', $_ } measures(20, $measure, 1);

	cmp_ok(min(@ms), '<=', 20, "$name: a call takes no 20 ms of processor time (@ms)");
	return;
}

# A key that has as many reservations as a key can have, all open or all ended: they are in one chain.
{
	my $id = q{lpad('9', 128, 'i')};
	my %call = (
		'a reservation above the most' => [ 1, "SELECT $reserve FROM generate_series(4097, 4097) n" ],
		'a reservation that deletes ended ones' => [ 0, "SELECT $reserve FROM generate_series(4097, 4097) n" ],
		'a retry' => [ 1, "SELECT $reserve FROM generate_series(9, 9) n" ],
		'an action' => [ 1, "SELECT rl_check('tenant', '$budgets')" ],
		'a settlement' => [ 1, "SELECT rl_settle('tenant', $id, 0)" ],
		'an extension' => [ 1, "SELECT rl_extend('tenant', $id)" ],
		'a reset of the limits' => [ 1, "SELECT rl_reset('tenant', '$budgets')" ],
		'a reset of the key' => [ 1, "SELECT rl_reset('tenant')" ]);

	# The first of them change nothing for the next ones.
	my @keep = ('a reservation above the most', 'a retry', 'an action', 'an extension');
	my %keep = map { $_ => 1 } @keep;
	my $there = 0;

	foreach my $name (@keep, grep { !$keep{$_} } sort keys %call)
	{
		my ($open, $sql) = @{ $call{$name} };
		my $tries = 0;

		is_short("$name, beside 4,096 reservations", sub {
			$session->ask(qq{SELECT rl_reset('tenant'); SET ratelimit.debug_now = '1700000000000000';
				SELECT count(r) FROM generate_series(1, 4096) n, $reserve r}) if $tries++ || !$there;
			$session->ask("SET ratelimit.debug_now = '1700090000000000'") unless $open;
			$there = $keep{$name};
			return processor_ms($sql);
		});
	}
}

# A store that is full of states with an entry each.  Each key has eight states, which
# end at different times.
my ($full, $grown) = is_long() ? (250_000, 100_000) : (50_000, 20_000);
my $states = 8 * $full;
my $eight = join ', ', map { "sliding_log 20/${_}h" } 101 .. 108;
my $ends_first = qq{SELECT count(*) FROM generate_series(1, $full) n, LATERAL rl_peek('full:' || n, 'sliding_log 20/101h', 0) p WHERE p.remaining < 20};
my $ends_last = $ends_first =~ s/101h/108h/r;
sub fill_up
{
	restart($states);
	answers("SELECT count(*) FILTER (WHERE rl_allow('full:' || n, '$eight')) FROM generate_series(1, $full) n", $full, "$full calls make $states states");
	is($session->ask('SELECT local_keys FROM rl_status()'), $states, "$states states are stored");
	return map { $session->ask($_) } $ends_first, $ends_last;
}

# Statements of ten calls.  Each measurement starts with a full store, so that it
# does not profit from the room that an earlier measurement made.
my ($first, $last);
is_short("a log that grows to $grown", sub {
	($first, $last) = fill_up();
	return longest(("SELECT take('grows', 'sliding_log $grown/200h', 10)") x ($grown / 10));
});
is($first, $full, 'each key had the state that ends first');
is($last, $full, 'each key had the state that ends last');
answers("SELECT remaining FROM rl_peek('grows', 'sliding_log $grown/200h', 0)", 0, 'the log has all its entries');
my $gone = $first - $session->ask($ends_first);
cmp_ok($gone, '>', 0, "$gone states were evicted");
cmp_ok($gone, '<=', $grown / 4, 'no more states than necessary were evicted');
answers($ends_last, $last, 'no state that ends last was evicted');
my $number = 0;
is_short('eight new states', sub {
	$number++;
	return longest(map { "SELECT rl_allow('new:$number:' || n, '$eight') FROM generate_series(1, 5) n" } 1 .. 200);
});
cmp_ok($session->ask('SELECT local_keys FROM rl_status()'), '<=', $states, 'the store keeps within its bound');

# A key's own states are passed when a victim is searched, but not without end while others wait.  A store of this
# size has one partition, so there is no other one with a victim.
restart(1_000);
my $tenant = q{generate_series(1, 600) n, LATERAL (SELECT ('fixed_window 9/' || 1000 + n || 's')::rl_limits AS limits) l};
answers("SELECT count(*) FILTER (WHERE rl_allow('tenant', limits)) FROM $tenant", 600, 'a key has 600 states, which end first');
answers(q{SELECT count(*) FILTER (WHERE rl_allow('other:' || n, '1/1d')) FROM generate_series(1, 400) n}, 400, 'other keys have the rest');
$session->ends(q{SELECT rl_allow('tenant', '1/2d')}, 'the key gets no other state', 'PT504');
answers("SELECT count(*) FROM $tenant, LATERAL rl_peek('tenant', limits, 0) p WHERE p.remaining < 9", 600, 'it keeps those that it has');
answers(q{SELECT rl_allow('another', '1/2d')}, 't', 'another key gets a state');
answers("SELECT count(*) FROM $tenant, LATERAL rl_peek('tenant', limits, 0) p WHERE p.remaining < 9", 599, 'in place of one of these');
$session->ends(q{SELECT rl_inspect('tenant')}, 'rl_inspect copies 256 states at most', '54000');

# A log that is as large as can be in the long form, of charges and of refusals.
my ($all, $half) = is_long() ? (100_000, 50_000) : (20_000, 10_000);
my $limit = "sliding_log $all/200h count_denied refund_on_abort";
my %call = (
	'a peek at half of the log' => [ "SELECT rl_peek('large', '$limit', $half)" ],
	'a refusal of half of it' => [ "SELECT rl_check('large', '$limit', $half)" ],
	'a refusal of all of it' => [ "SELECT rl_check('large', '$limit', $all)" ],
	'a refund of half of it' => [ "SELECT rl_refund('large', '$limit', $half)" ],
	'a rollback in the middle of it' => [ 'BEGIN', "SELECT rl_check('large', '$limit')", "SELECT take('large', 'sliding_log $all/200h', $half)", 'ROLLBACK' ],
	'a reset' => [ "SELECT rl_reset('large')" ],
	'rl_status' => [ 'SELECT rl_status()' ],
	# Its name comes last, because it ends the states of the other calls too.
	'the first call after the log has ended' => [ q{SELECT set_config('ratelimit.debug_now', (current_setting('ratelimit.debug_now')::bigint + 800000000000)::text, false)},
		"SELECT rl_check('large', '$limit')" ]);
foreach my $name (sort keys %call)
{
	is_short($name, sub {
		my $rollback = $name =~ /rollback/;

		$session->ask(qq{SELECT rl_reset('large');
			SELECT take('large', 'sliding_log $all/200h', } . ($rollback ? $half - 1 : $all) . qq{);
			SELECT take('large', '$limit', } . ($rollback ? 0 : $all) . ')');
		# The statement that makes the log larger has many calls, so it does not count.
		return max(map { my $ms = processor_ms($_); /take/ ? 0 : $ms } @{ $call{$name} });
	});
}

done_testing();
