# rl_check_all in a Redis Cluster: keys of a tag are charged in one step, unless their slot is
# moving.  Keys of several slots are charged all or none too, also when a call is cancelled, a
# backend ends, or a master is lost in between.  If quota stays taken, the server's log says so.
#
# RATELIMIT_SEED repeats a run.
#
# Runs once with a server: it depends on the Cluster.
use RatelimitTest;
use Engines;
use RedisCluster;

my $seed = seed();
my $cluster = RedisCluster->new(masters => 3);
my $single = RedisServer->new->start;
my $node = shared_node($single, 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0',
	"ratelimit.redis_url = '" . $cluster->url . "'");
my $session = session($node);

# Returns names that the given masters have, one each.
my $names = 0;

sub names
{
	my (@masters) = @_;

	return map {
		my $master = $_;
		my $name;

		do { $name = 'name:' . $names++ } until $cluster->first_owner($cluster->slot($name)) == $master;
		$name;
	} @masters;
}

# Returns keys as the text of an array.
sub array { return '{' . join(',', map { qq("$_") } @_) . '}'; }

# Returns a call of rl_check_all with one text of limits for all keys, as a query of its verdicts.
sub call
{
	my ($limits, @keys) = @_;

	return sprintf q{SELECT string_agg(allowed::text, ' ' ORDER BY ordinality) FROM rl_check_all('%s', ARRAY[%s]::rl_limits[]) WITH ORDINALITY},
	  array(@keys), join(',', map { "'$limits'" } @keys);
}

# Returns a query of the used quota of each key.
sub used
{
	my ($limits, @keys) = @_;

	return "SELECT string_agg((capacity - remaining)::text, ' ' ORDER BY n) FROM unnest('" . array(@keys)
	  . "'::text[]) WITH ORDINALITY k (k, n), rl_peek(k, '$limits', 0)";
}

sub lost { return sum0(new_log($node) =~ /could not refund (?:the charges of up to )?(\d+) .*of a refused or failed action/g); }

#
# The verdicts and the states are those of a single server
#

redis_engine($node);
my @steps;
my $groups = all_seeds(is_long() ? 40 : 6);
foreach my $n (1 .. $groups)
{
	reseed($n - 1, $groups);
	my @keys = map { { key => $_, limits => [ map { random_limit($_) } random_tags() ] } } names(shuffle(0, 0, 1, 1, 2, 2));
	my $now = 10**9 + below(3 * 10**9) * 1_000_000;

	foreach (1 .. 40)
	{
		my $limit = pick(@{ pick(@keys)->{limits} });
		my $left = 8;
		my @parts = map { {
				%$_, argument => chance(70) ? 1 : chance(40) ? 0 : 1 + below(min(2**40, $_->{limits}[0]{capacity})),
				limits => [ grep { $_->{algorithm} !~ /^sliding/ || $left-- > 0 } @{ $_->{limits} } ] } }
		  (shuffle @keys)[ 0 .. below(scalar @keys) ];

		@parts = grep { @{ $_->{limits} } } @parts;
		$now += chance(60) ? 0 : below(2 + int($limit->{period} / $limit->{capacity}));
		last if $now > 4_000_000_000_000_000;
		push @steps, { form => 'all', key => "group $n", group => "group $n", now => $now, parts => \@parts } if @parts;
		push @steps, map { { form => 'peek', group => "group $n", now => $now, argument => 0, %$_ } } @keys;
	}
}
my $clustered = redis_steps($node, @steps);
$session->set_for_new(redis_url => $single->url);
my $alone = redis_steps($node, @steps);
$session->set_for_new(redis_url => undef);
my (@wrong, %seen);
foreach my $i (0 .. $#steps)
{
	my ($here, $there) = ($clustered->[$i], $alone->[$i]);
	my @columns = $steps[$i]{form} eq 'all' ? (0) : (0 .. 5);

	foreach my $n (sort keys %$there)
	{
		$seen{ $steps[$i]{form} . ($there->{$n}[0] ? ' allowed' : ' refused') }++;
		my ($got, $want) = map { join ', ', map { $_ // 'NULL' } @{ $_->{$n} || [] }[@columns] } $here, $there;

		push @wrong, "step $i, row $n: $got, and not $want: $steps[$i]{key} " . limits_text(@{ $steps[$i]{limits} || [] }) if $got ne $want;
	}
}
none(\@wrong, 'verdicts and states are those of a single server');
cmp_ok($seen{$_} || 0, '>', 7 * $groups, "$_: " . ($seen{$_} || 0)) foreach 'all allowed', 'all refused', 'peek allowed';

#
# Sessions and slots
#

# A new session does not know that this is a cluster.
my @keys = names(0, 1, 2);
foreach my $first (0 .. 2)
{
	my $url = $cluster->url(first => $first);
	is($node->safe_psql('postgres', "SET ratelimit.redis_url = '$url'; " . call('fixed_window 9/3650d', @keys)), 'true true true',
		"the first call of a session, at master $first");
}
is($session->ask(used('fixed_window 9/3650d', @keys)), '3 3 3', 'each call charged each key once');

# Keys of one slot are one call: those of a tag, and the key that is the tag.
my ($tag) = names(0);
my @same = ($tag, map { "{$tag}$_" } 1 .. 3);
$session->ask(call('5/1h', @keys));
$_->cli('CONFIG', 'RESETSTAT') foreach $cluster->masters;
is($session->ask(call('fixed_window 1/3650d', @same)), 'true true true true', 'keys of one slot');
is($session->ask(call('fixed_window 1/3650d', @same)), 'false false false false', 'keys of one slot are refused');
is(sum0(map { $_->calls('evalsha') + $_->calls('eval') } $cluster->masters), 2, 'keys of one slot need one call');

# While their slot moves, and the keys are at both nodes or not there yet, each key is asked.
my $slot = $cluster->slot($tag);
my ($from, $to) = (0, 1);
my $rule = 'fixed_window 5/3650d';
$session->ask("SELECT rl_reset(k) FROM unnest('" . array(@same) . "'::text[]) k");
$session->ask("SELECT rl_check('$same[$_]', '$rule')") foreach 0, 1;
$_->cli('CONFIG', 'RESETSTAT') foreach $cluster->masters;
$cluster->begin_move($slot, $from, $to);
$session->set(command_timeout => '1min');
is($session->ask("SELECT allowed FROM rl_check('$same[2]', '$rule')"), 't', 'a key that begins at the target');
is($session->ask(call($rule, @same)), 'true true true true', 'keys at two nodes while their slot moves');
is($session->ask(used($rule, @same)), '2 2 2 1', 'each key is charged once');
is($session->ask(call($rule, @same[ 2, 3 ])), 'true true', 'keys at the target');
is($session->ask("SELECT string_agg(allowed::text, ' ' ORDER BY ordinality) FROM rl_check_all('" . array(@same)
		. "', array_fill('$rule'::rl_limits, ARRAY[4]), '{1,1,1,4}') WITH ORDINALITY"), 'true true true false', 'one key refuses');
is($session->ask(used($rule, @same)), '2 2 3 2', 'no key is charged');
is($session->ask(call($rule, @same, @keys)), 'true ' x 6 . 'true', 'with keys of other slots');
is($session->ask(used($rule, @same)), '3 3 4 3', 'each key is charged once');
is(sum0(map { $_->errors('TRYAGAIN') } $cluster->masters), 2, 'no call was sent again and again');

# A new session does not know that this is a cluster.
foreach my $call (call($rule, @same), "SELECT string_agg(allowed::text, ' ') FROM rl_check_many('" . array(@same) . "', '$rule')")
{
	my $url = $cluster->url(first => $from);

	is($node->safe_psql('postgres', "SET ratelimit.redis_url = '$url'; SET ratelimit.command_timeout = '1min'; $call"), 'true true true true', 'a new session while the slot moves');
	$session->ask("SELECT rl_refund(k, '$rule', 1) FROM unnest('" . array(@same) . "'::text[]) k");
	is($session->ask(used($rule, @same)), '3 3 4 3', 'each key was charged once');
}
is(sum0(map { $_->errors('TRYAGAIN') } $cluster->masters), 4, 'no call was sent again and again');
$session->set(command_timeout => undef);
$cluster->end_move($slot, $from, $to);
is($session->ask(call($rule, @same)), 'true true true true', 'when the slot has moved');
is($session->ask(used($rule, @same)), '4 4 5 4', 'the move lost nothing');
$_->cli('CONFIG', 'RESETSTAT') foreach $cluster->masters;
is($session->ask(call('5/1h', @same)), 'true true true true', 'keys of one slot');
is(sum0(map { $_->calls('evalsha') + $_->calls('eval') } $cluster->masters), 1, 'are one call again');
is($session->ask(call($rule, $same[0], @keys)), 'true true true true', 'a key of the slot that moved, and others');

#
# A refused call
#

my @three = names(0, 1, 2);
my $log = 'sliding_log 3/3650d';
$session->ask(qq{SELECT rl_check('$three[1]', '$log', 3)});
foreach my $form ("BEGIN; %s; COMMIT", "BEGIN; %s; ROLLBACK", "BEGIN; SAVEPOINT s; %s; ROLLBACK TO s; COMMIT", '%s')
{
	is($session->ask(sprintf $form, call($log, @three)), 'true false true', "one key refuses: $form");
	is($session->ask(used($log, @three)), '0 3 0', 'the charges of the others are refunded');
}
is($session->ask(qq[SELECT string_agg(remaining::text, ' ') FROM rl_check_all('{] . join(',', @three) . qq[}', ARRAY['$log', '$log', '$log']::rl_limits[], '{2,1,2}')]), '3 0 3',
	'the rows show the quota that is left after the refund');
my @counts = map { "fixed_window 9/3650d$_" } ' count_denied', '', ' ban 1h after 2';
my @four = names(0, 1, 2);
my $mixed = 'SELECT count(*) FROM rl_check_all(ARRAY[' . join(',', map { "'$_'" } @four, $three[1]) . '], ARRAY['
  . join(',', map { "'$_'" } @counts, $log) . ']::rl_limits[], ARRAY[2, 2, 2, 1])';
$session->ask($mixed) foreach 1 .. 3;
is($session->ask(used('fixed_window 9/3650d', @four)), '6 0 0', 'only a key with count_denied counts the refusals');
is($session->ask("SELECT count(*) FROM rl_peek('$four[2]', '$counts[2]') WHERE source = 'ban'"), '0', 'a limit that allows counts none for its ban');

# refund_on_abort, of an action that happened.
my @back = names(0, 1, 2);
$session->ask('BEGIN; ' . call("$rule refund_on_abort", @back) . '; ROLLBACK');
is($session->ask(used($rule, @back)), '0 0 0', 'a rollback refunds all keys');
$session->ask('BEGIN; ' . call("$rule refund_on_abort", @back) . '; COMMIT');
is($session->ask(used($rule, @back)), '1 1 1', 'a commit refunds none');

# Concurrent limits.
my @held = names(0, 1, 2);
is($session->ask('BEGIN; ' . call('concurrent 1/1h', @held)), 'true true true', 'a transaction takes a unit of each key');
is($session->ask(call('concurrent 1/1h', @held[ 0, 1 ])), 'false false', 'which it holds');
is($session->ask(call('concurrent 2/1h', @held[ 0, 2 ]) . '; ' . used('concurrent 2/1h', @held)), "true true\n2 1 2", 'and more of two keys');
$_->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes') foreach $cluster->masters;
$session->ask('COMMIT');
settled($session);
is($session->ask(used('concurrent 1/1h', @held)), '0 0 0', 'a commit refunds all of them, although the connections were lost');
is(lost(), 0, 'nothing was lost');

#
# A call that ends in between
#

# One master is suspended, so that the others have answered.
my @ends = names(0, 1, 2);
my $big = '10000/1d';
is($session->ask(call($big, @ends)), 'true true true', 'a call of each master');
my $zero = $session->ask(used('fixed_window 1000/3650d', @ends));
my $long = 'fixed_window 1000/3650d';
foreach my $case ('cancel', 'caught', 'timeout', 'terminate')
{
	my $victim = session($node);

	$victim->ask(call($big, @ends));
	$victim->ask("SET ratelimit.command_timeout = '" . ($case eq 'timeout' ? '1s' : '10min') . "'");
	$victim->ask("SET statement_timeout = '1s'") if $case =~ /^c/;
	my $pid = $victim->ask('SELECT pg_backend_pid()');
	my $before = $session->ask(used($long, @ends[ 0, 1 ]));
	new_log($node);
	$cluster->master(2)->pause;
	if ($case eq 'terminate')
	{
		$victim->send(call($long, @ends) . ';');
		await('the other masters to be charged', sub { $session->ask(used($long, @ends[ 0, 1 ])) ne $before });
		$session->ask("SELECT pg_terminate_backend($pid)");
	}
	elsif ($case eq 'caught')
	{
		# attempt() catches the error, and another call sends the refund.
		is($victim->attempt(call($long, @ends))->{state}, '57014', "$case: the state");
		$victim->ask("RESET statement_timeout; SELECT rl_peek('$ends[0]', '$long', 0)");
	}
	else
	{
		$victim->ask(call($long, @ends));
		like($victim->error, $case eq 'cancel' ? qr/57014/ : qr/PT504/, "$case: the error");
	}
	await("$case: the refunds", sub { $session->ask(used($long, @ends[ 0, 1 ])) eq $before });
	pass("$case: the charges of the others are refunded");
	await("$case: the log", sub { $node->log_contains(qr/charges of up to 1 calls of a refused or failed action/, $node->{ratelimit_log_seen}) });
	is(lost(), 1, "$case: the log says that one call may have been charged");
	$cluster->master(2)->resume;
}

# on_error applies to all keys together.
$session->ask("SET ratelimit.command_timeout = '200ms'; SET ratelimit.connect_timeout = '200ms'");
$cluster->master(2)->pause;
my @errors = names(0, 1, 2);
my $sources = q[SELECT string_agg(source, ' ') FROM rl_check_all('{] . join(',', @errors) . qq[}', ARRAY['$rule', '$rule', '$rule']::rl_limits[])];
is($session->attempt($sources)->{state}, 'PT504', 'error');
foreach my $case ([ allow => 'fail_open' ], [ deny => 'fail_closed' ], [ local => 'local' ])
{
	$session->ask("SET ratelimit.on_error = $case->[0]");
	is($session->ask($sources), "$case->[1] " x 2 . $case->[1], "on_error = $case->[0]");
}
$cluster->master(2)->resume;
$session->ask('RESET ratelimit.on_error; RESET ratelimit.command_timeout; RESET ratelimit.connect_timeout');
await('the refunds', sub { $session->ask(used($rule, @errors[ 0, 1 ])) eq '0 0' });
pass('no quota of a failed call stays taken');

#
# Eight clients, and a master that is killed
#

my @pool = names(shuffle(0, 0, 0, 1, 1, 1, 2, 2));
$session->ask(q{
	CREATE UNLOGGED TABLE charged (keys text[], allowed boolean, failed boolean);
	CREATE TABLE pool (k text, rule rl_limits);
	INSERT INTO pool SELECT k, (ARRAY['fixed_window 300/3650d', 'sliding_log 400/3650d', 'token_bucket 500/3650d',
		'sliding_window 600/3650d step 73d', 'fixed_window 700/3650d', 'sliding_log 350/3650d', 'token_bucket 450/3650d', 'fixed_window 550/3650d'])[n]::rl_limits
		FROM unnest(ARRAY[} . join(',', map { "'$_'" } @pool) . q{]) WITH ORDINALITY u (k, n);
	CREATE FUNCTION charge() RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		ks text[];
		rs rl_limits[];
		ok boolean;
	BEGIN
		SELECT array_agg(k), array_agg(rule) INTO ks, rs FROM (SELECT * FROM pool ORDER BY random() LIMIT 2 + random() * 3) s;
		BEGIN
			SELECT bool_and(allowed) INTO ok FROM rl_check_all(ks, rs);
		EXCEPTION WHEN SQLSTATE 'PT504' THEN
			ok := NULL;
		END;
		INSERT INTO charged VALUES (ks, ok, ok IS NULL);
	END $$;
	CREATE TABLE stop ();
	CREATE PROCEDURE charge_until_stop() LANGUAGE plpgsql AS $$
	BEGIN
		LOOP
			PERFORM charge();
			COMMIT;
			EXIT WHEN EXISTS (SELECT FROM stop);
		END LOOP;
	END $$});
my $balance = q{SELECT string_agg(used - taken || '', ' ' ORDER BY k) FROM (
	SELECT k, p.capacity - p.remaining AS used, (SELECT count(*) FROM charged WHERE allowed AND k = ANY (keys)) AS taken
	FROM pool, rl_peek(k, rule, 0) p WHERE NOT k = ANY ('{%s}')) s};
new_log($node);
finish_clients(start_clients($node, 'a cluster that is well', 'SELECT charge();', '-t', is_long() ? 400 : 200));
note 'calls: ', $session->ask('SELECT count(*), count(*) FILTER (WHERE allowed) FROM charged');
is($session->ask('SELECT count(*) FILTER (WHERE allowed) > 100, count(*) FILTER (WHERE NOT allowed) > 100, bool_or(failed) FROM charged'), 't|t|f', 'many calls were allowed, and many refused');
is($session->ask(sprintf $balance, ''), join(' ', (0) x 8), 'the used quota of each key is that of the allowed calls');
is(lost(), 0, 'nothing was lost');

# Each lost call is at most one unit of each key.
$session->ask(q{TRUNCATE charged; SELECT rl_reset(k) FROM pool});
my $clients = start_clients($node, 'a master is killed', 'CALL charge_until_stop();', '-t', 1);
await('the load', sub { $session->ask('SELECT count(*) FILTER (WHERE allowed) > 50 FROM charged') eq 't' });
$cluster->master(2)->stop;
await('failures', sub { $session->ask('SELECT count(*) FILTER (WHERE failed) > 50 FROM charged') eq 't' });
pass('calls of the lost master fail');
my $asked = $session->ask('SELECT count(*) FROM charged') + (is_long() ? 1000 : 200);
await('more calls', sub { $session->ask("SELECT count(*) > $asked FROM charged") eq 't' });
$session->ask('INSERT INTO stop DEFAULT VALUES');
finish_clients($clients);
my $dead = join ',', grep { $cluster->first_owner($cluster->slot($_)) == 2 } @pool;
my @over = split / /, $session->ask(sprintf $balance, $dead);
my $lost = lost();
note "used quota beyond that of the allowed calls: @over; the log says $lost";
is(scalar @over, 6, 'the keys of the other masters');
is(scalar(grep { $_ < 0 || $_ > $lost } @over), 0, 'no quota of a call that failed stays taken, or the log says so');

done_testing();
