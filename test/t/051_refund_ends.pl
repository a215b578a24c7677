# All ends of a transaction, also while Redis fails: quota that it was granted under
# refund_on_abort is refunded to the store that granted it, or the server's log shows
# that it was not.  No second error is raised.
#
# Runs once in a suite: transactions end in PostgreSQL.
use RatelimitTest;
use LyingServer;
use RedisMonitor;
use TcpProxy;

my ($redis, $node, $session) = start_servers(\&shared_node, 'max_prepared_transactions = 2', 'ratelimit.retry_interval = 0');
my $watcher = session($node);
my @others = (session($node));
my $pid = $session->pid;

# A limit of each algorithm, each with ten units, which do not replenish during the test.
my $all = join ', ', map { "$_ refund_on_abort" } '10/10d', 'token_bucket 10/10d', 'fixed_window 10/10d from_first',
  'sliding_window 10/10d', 'sliding_log 10/10d';
$session->ask(qq{
	CREATE FUNCTION take(key text, quota int) RETURNS text LANGUAGE sql VOLATILE
		RETURN (SELECT CASE WHEN allowed THEN source ELSE 'refused by ' || source END FROM rl_check(key, '$all', quota));
	CREATE FUNCTION free(key text) RETURNS text LANGUAGE sql VOLATILE
		RETURN (SELECT string_agg(DISTINCT remaining::text, ' ') FROM rl_peek(key, '$all', 0))});

my $keys = 0;

sub new_key { return 'key:' . ++$keys; }

# Returns the quota of the five limits that other sessions see as free.
sub free
{
	my ($key) = @_;
	my ($settled, $free);

	await('overdue refunds', sub {
		($settled, $free) = split /\n/, $watcher->ask("SELECT coalesce(refunds_overdue, 0) = 0 FROM rl_status(); SELECT free('$key')");
		return $settled eq 't';
	});
	return $free;
}

# Returns the numbers of charges that could not be refunded, by the new lines of the
# log, and the reasons.  On a busy machine Redis may have no time to answer; it runs the call later.
sub lost
{
	my ($silent, $log) = @_;
	my @words = ($log // new_log($node)) =~ /could not refund (\d+) rate-limit charges.*\n.*DETAIL:  (.*)/g;
	my @lost = map { [ @words[ 2 * $_, 2 * $_ + 1 ] ] } 0 .. @words / 2 - 1;

	return grep { $silent || $_->[1] !~ /^lost the connection to Redis: ratelimit.command_timeout has passed/ } @lost;
}

# Runs a command that ends a transaction; returns its duration in milliseconds.
sub timed
{
	my ($sql) = @_;

	return (split /\n/, $session->ask(
			"SELECT clock_timestamp() AS began \\gset\n$sql\nSELECT extract(epoch FROM clock_timestamp() - :'began') * 1000"))[-1];
}

#
# Ends
#

foreach my $end (
	[ 'COMMIT', 5 ], [ 'ROLLBACK', 10 ], [ 'SELECT 1/0; COMMIT', 10 ], [ 'SELECT 1/0; ROLLBACK', 10 ],
	[ "PREPARE TRANSACTION 'kept'; ROLLBACK PREPARED 'kept'", 5 ], [ "PREPARE TRANSACTION 'kept'; COMMIT PREPARED 'kept'", 5 ],
	[ "SAVEPOINT s; SELECT take(KEY, 3); ROLLBACK TO s; COMMIT", 5 ],
	[ "SAVEPOINT s; SELECT take(KEY, 3); ROLLBACK TO s; RELEASE s; COMMIT", 5 ],
	[ "SAVEPOINT s; SELECT take(KEY, 3); ROLLBACK TO s; PREPARE TRANSACTION 'kept'; ROLLBACK PREPARED 'kept'", 5 ],
	[ "SAVEPOINT s; SELECT take(KEY, 3); RELEASE s; COMMIT", 2 ], [ "SAVEPOINT s; SELECT take(KEY, 3); RELEASE s; ROLLBACK", 10 ],
	[ "SET LOCAL statement_timeout = '20ms'; SELECT pg_sleep(60); COMMIT", 10 ])
{
	my ($sql, $free) = @$end;

	foreach my $mode ('', ' READ ONLY')
	{
		my $key = new_key();
		next if $mode && $sql =~ /PREPARE/;
		$session->ask("BEGIN$mode; SELECT take('$key', 5); " . $sql =~ s/KEY/'$key'/r);
		is(free($key), $free, "BEGIN$mode; ...; $sql");
	}
}
{
	my $key = new_key();

	$session->ask("BEGIN; SELECT take('$key', 2); SAVEPOINT s; SELECT take('$key', 3); ROLLBACK TO s");
	is(free($key), 5, 'the rollback of a savepoint only queues the refund');
	$session->ask(q{SELECT free('another')});
	is(free($key), 8, 'the next command sends the refund');
	is($session->ask('SELECT pg_current_xact_id_if_assigned() IS NULL'), 't', 'the transaction has no transaction ID');
	$session->ask('COMMIT');
	is(free($key), 8, 'the refund is sent once');
}

# A reset that Redis does not run deletes no charge.
{
	my $key = new_key();

	$session->ask("BEGIN; SELECT take('$key', 5); SAVEPOINT s");
	$redis->cli(qw(ACL SETUSER default -hdel -unlink));
	is($session->attempt("SELECT rl_reset('$key')")->{state}, 'PT504', 'rl_reset fails');
	$redis->cli(qw(ACL SETUSER default +hdel +unlink));
	$session->ask('ROLLBACK');
	is(free($key), 10, 'afterwards a rollback refunds');
}

# Another session resets the key or its limits, or deletes the key, while the transaction is open: a rollback gives back
# nothing that others have taken since, and refunds what the transaction itself has taken since.
foreach my $store ('redis', 'local')
{
	$_->set(store => $store) foreach $session, $watcher, $others[0];
	foreach my $limit ('10/10d', 'token_bucket 10/10d', 'fixed_window 10/10d', 'fixed_window 10/10d from_first', 'fixed_window 10/month',
		'sliding_window 10/10d', 'sliding_log 10/10d', 'concurrent 10/1h')
	{
		my $option = $limit =~ /concurrent/ ? $limit : "$limit refund_on_abort";
		my %take = (
			rl_check => sub { return "SELECT allowed FROM rl_check('$_[0]', '$option', $_[1])" },
			'rl_check of a list' => sub { return "SELECT allowed FROM rl_check('$_[0]', '$option, 100/20d', $_[1])" },
			rl_check_many => sub { return "SELECT allowed FROM rl_check_many(ARRAY['$_[0]'], '$option', ARRAY[$_[1]])" },
			rl_check_all => sub { return "SELECT bool_and(allowed) FROM rl_check_all(ARRAY['$_[0]', 'other:$_[0]'], ARRAY['$option', '100/20d']::rl_limits[], ARRAY[$_[1], 1])" });
		my %reset = ('rl_reset of the limits' => sub { return "SELECT rl_reset('$_[0]', '$limit')" }, rl_reset => sub { return "SELECT rl_reset('$_[0]')" },
			$store eq 'redis' ? (DEL => undef) : ());
		my (@forms, @resets, @keys, @wrong);

		# Each form with each reset has a key of its own, in one transaction.
		foreach my $form (sort keys %take)
		{
			foreach my $reset (sort keys %reset) { push @forms, $form; push @resets, $reset; push @keys, new_key(); }
		}
		my $take = sub { my ($quota) = @_; return join ";\n", map { $take{ $forms[$_] }->($keys[$_], $quota) } 0 .. $#keys };
		my $left = sub { return split /\n/, $watcher->ask(join ";\n", map { "SELECT remaining FROM rl_peek('$_', '$limit', 0)" } @keys) };
		my $check = sub {
			my ($what, $expected, @got) = @_;
			push @wrong, map { "$limit, $forms[$_], $resets[$_]: $what: " . ($got[$_] // 'nothing') } grep { ($got[$_] // '') !~ /^(?:$expected)$/ } 0 .. $#keys;
		};

		$check->('the first charge', 't', split /\n/, $session->ask("BEGIN;\n" . $take->(4)));
		$redis->cli('DEL', map { "rl:{$keys[$_]}" } grep { $resets[$_] eq 'DEL' } 0 .. $#keys) if $store eq 'redis';
		$watcher->ask(join ";\n", map { $reset{ $resets[$_] }->($keys[$_]) } grep { $resets[$_] ne 'DEL' } 0 .. $#keys);
		$check->('a charge by others', 't', split /\n/, $others[0]->ask("BEGIN;\n" . $take->(6)));
		$check->('the second charge', 't', split /\n/, $session->ask($take->(3)));
		$session->ask('ROLLBACK');
		$check->('what is left after the rollback', 4, $left->());
		$others[0]->ask('ROLLBACK');
		# A throttle's two refunds both leave out the milliseconds in which the charges overlapped.
		$check->('what is left in the end', $limit eq '10/10d' ? '10|9' : 10, $left->());
		is_deeply(\@wrong, [], "$limit ($store): nothing is given back twice");
	}
	$_->ask('RESET ratelimit.store') foreach $session, $watcher, $others[0];
}

# A transaction that is canceled or terminated, and a client that disconnects.
{
	my $key = new_key();

	$session->ask("BEGIN; SELECT take('$key', 5)");
	$session->send("SELECT pg_sleep(600)\n;");
	$watcher->await_waiting($pid, 'Timeout');
	$watcher->ask("SELECT pg_cancel_backend($pid)");
	$session->ask('');
	is(free($key), 10, 'pg_cancel_backend: quota that was taken before is refunded at once');
	$session->ask('ROLLBACK');

	foreach my $how ('is terminated', 'disconnects')
	{
		my $victim = session($node);
		my $victim_pid = $victim->pid;

		$key = new_key();
		is($victim->ask("BEGIN; SELECT take('$key', 5)"), 'redis', "a session takes quota and $how");
		$how eq 'disconnects' ? $victim->quit : $watcher->ask("SELECT pg_terminate_backend($victim_pid)");
		$watcher->await_end($victim_pid);
		is(free($key), 10, "a session that $how in a transaction: its quota is refunded");
		eval { $victim->quit };
	}
}
is_deeply([ lost() ], [], 'no refund was lost so far');

#
# Tables
#

$session->ask(qq{
	CREATE TABLE orders (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, customer text, items int CHECK (items < 100));
	CREATE TRIGGER before BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('before:{customer}', '$all');
	CREATE TRIGGER after AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('after:{customer}', '$all');
	CREATE CONSTRAINT TRIGGER deferred AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('deferred:{customer}', '$all');
	INSERT INTO orders VALUES (1, 'somebody', 1)});
sub orders { my ($customer) = @_; return join ' ', map { free("$_:$customer") } qw(before after deferred); }

$session->ask(q{INSERT INTO orders VALUES (2, 'ann', 1), (3, 'ann', 2)});
is(orders('ann'), '8 8 8', 'committed rows are counted');
$session->ends(q{INSERT INTO orders VALUES (4, 'bob', 1), (5, 'bob', 2), (6, 'bob', 100)}, 'a check fails on the third row', '23514');
is(orders('bob'), '10 10 10', 'all three rows are refunded');
$session->ends(q{INSERT INTO orders VALUES (7, 'cid', 1), (1, 'cid', 1)}, 'a deferred constraint fails at commit', '23505');
is(orders('cid'), '10 10 10', 'all rows are refunded, those of a deferred trigger too');
$session->ask(q{BEGIN; INSERT INTO orders VALUES (8, 'dan', 1); SET CONSTRAINTS ALL IMMEDIATE; INSERT INTO orders VALUES (1, 'dan', 1)});
is($session->state . orders('dan'), '2350510 10 10', 'all rows are refunded when constraints are made immediate');
$session->ask(q{ROLLBACK; INSERT INTO orders SELECT n, 'eve', 1 FROM generate_series(20, 31) n});
is($session->state . orders('eve'), 'PT41310 10 10', 'the eleventh row is refused, and ten rows are refunded');
is($session->ask(q{SELECT count(*) FROM orders}), 3, 'the table has none of these rows');

#
# Redis is suspended
#

my (@ms, @commit_ms, @error_ms);
foreach my $try (1 .. 20)
{
	last if $try > 2 && max(map { min(@$_) } \@ms, \@commit_ms, \@error_ms) <= 150;
	my $key = new_key();
	my $count = $watcher->ask('SELECT refunds_lost FROM rl_status()');

	$session->ask("BEGIN; SELECT take('$key', 5); SET LOCAL ratelimit.command_timeout = '100ms'");
	$redis->pause;
	push @ms, timed('ROLLBACK;');
	is($session->error, '', 'ROLLBACK while Redis is suspended raises no error');
	$redis->resume;
	is_deeply([ lost(1) ], [ [ 5, 'lost the connection to Redis: ratelimit.command_timeout has passed' ] ], 'the log shows the lost refund');
	is(free($key), 10, 'Redis runs the refund that it had no time to answer');
	is($watcher->ask('SELECT refunds_lost FROM rl_status()') - $count, 5, 'rl_status counts it as lost nevertheless');

	$key = new_key();
	$session->ask("BEGIN; INSERT INTO orders VALUES (100 + $try, 'fay$try', 1); SAVEPOINT s; SELECT take('$key', 5);
		SET LOCAL ratelimit.command_timeout = '100ms'; ROLLBACK TO s; SET LOCAL ratelimit.command_timeout = '100ms'; SET CONSTRAINTS ALL IMMEDIATE;
		SAVEPOINT s; SELECT take('$key', 5); ROLLBACK TO s");
	$redis->pause;
	push @commit_ms, timed('COMMIT;');
	is($session->error, '', 'COMMIT while Redis is suspended raises no error');
	$redis->resume;
	is_deeply([ lost(1) ], [ [ 5, 'lost the connection to Redis: ratelimit.command_timeout has passed' ] ], 'the log shows the lost refund of COMMIT');
	is($session->ask("SELECT count(*) FROM orders WHERE id = 100 + $try"), 1, 'COMMIT commits');

	$key = new_key();
	$session->ask("BEGIN; SELECT take('$key', 5); SET LOCAL ratelimit.command_timeout = '100ms'");
	$redis->pause;
	push @error_ms, timed("SELECT 1/0;\nROLLBACK;");
	is(join(' ', $session->error =~ /(?:ERROR|FATAL|PANIC|WARNING):  (\w+)/g), '22012', 'an error in a transaction stays the only error');
	$redis->resume;
	is($session->ask('SELECT 1'), 1, 'the session still works');
	is_deeply([ map { $_->[0] } lost(1) ], [5], 'the log shows the lost refund after the error');
}
note "ROLLBACK took @ms ms, COMMIT @commit_ms ms, an error @error_ms ms";
cmp_ok(min(@$_), '<=', 150, 'the transaction ends within command_timeout + 50 ms') foreach \@ms, \@commit_ms, \@error_ms;
cmp_ok(min(@$_), '>=', 99, 'the transaction waits for command_timeout') foreach \@ms, \@commit_ms, \@error_ms;

# A call is interrupted: its own charge is unknown, the charges before it are known.
foreach my $how ('statement_timeout', 'pg_cancel_backend', 'pg_terminate_backend')
{
	my $key = new_key();
	my $victim = session($node);
	my $victim_pid = $victim->pid;

	$victim->ask("BEGIN; SELECT take('$key', 5)");
	$victim->ask("SET LOCAL statement_timeout = '2s'") if $how eq 'statement_timeout';
	$redis->pause;
	$victim->send("SELECT take('$key', 1)\n;");
	$watcher->await_waiting($victim_pid);
	$watcher->ask("SELECT $how($victim_pid)") if $how ne 'statement_timeout';
	# Then it waits where it cannot be interrupted.
	await('the wait to end', sub { return $watcher->waits_for($victim_pid) ne 'Extension' });
	# The connection that the call has left in doubt is not used: the refund is overdue.
	if ($how eq 'pg_terminate_backend')
	{
		$watcher->await_end($victim_pid);
		$redis->resume;
		eval { $victim->quit };
	}
	else
	{
		$victim->ends('', "$how interrupts a call", '57014');
		$redis->resume;
		is($victim->ask("ROLLBACK; SELECT take('another', 0)"), 'redis', "$how: the session still works");
		$victim->quit;
	}
	like(free($key), qr/^(9|10)$/, "$how in a call: charges that were answered before are refunded");
}

# Returns the numbers of calls without an answer in the new lines of the log, and those of other refunds that are lost.
sub unanswered { return join ' ', new_log($node) =~ /could not refund (?:the charges of up )?(to \d+|\d+)/g; }

is(unanswered(), 'to 1 to 1 to 1', 'the log shows each call without an answer, and no other refund is lost');

# The same without an interrupt.
{
	my $refunded = '10/10d refund_on_abort';

	$session->ask("SELECT take('another', 0)");
	foreach my $call (
		[ "rl_check('silent', '10/10d')", '' ],
		[ "rl_check('silent', '$refunded', 0)", '' ],
		[ "rl_check('silent', '$refunded')", 'to 1' ],
		[ "rl_check_all('{silent:1,silent:2,silent:3}', ARRAY['10/10d', '$refunded', '$refunded']::rl_limits[])", 'to 1' ],
		[ "rl_check_many('{silent:1,silent:2,silent:3}', '$refunded')", 'to 3' ],
		[ "rl_check_many('{silent:1,silent:2,silent:3}', '10/10d')", '' ])
	{
		my ($sql, $expected) = @$call;

		$redis->pause;
		$session->ask("SET ratelimit.command_timeout = '100ms'");
		is($session->attempt("SELECT count(*) FROM $sql")->{state}, 'PT504', "$sql without an answer");
		$session->ask('RESET ratelimit.command_timeout');
		$redis->resume;
		is(unanswered(), $expected, 'what may stay charged is logged if it should be refunded');
		is($session->ask("SELECT take('another', 0)"), 'redis', 'the next call is answered');
	}
}

# The call is interrupted when a part of its reply has come.
{
	my ($begun, $goes_on) = map { PostgreSQL::Test::Utils::tempdir . "/$_" } qw(begun goes_on);
	my @replies = ([ join("\r\n:", '*5', 0, 0, time * 1_000_000, 0, time * 1_000_000) . "\r\n" ],
		[ "*2\r\n:1\r\n", sub { append_to_file($begun, ''); return -e $goes_on }, ":1000000\r\n" ], [":1\r\n"]);
	my $liar = LyingServer->new(sub { return @{ shift @replies } });
	my $victim = session($node);
	my $victim_pid = $victim->pid;

	is($victim->ask("SET ratelimit.redis_url = '" . $liar->url . "'; BEGIN; SELECT allowed FROM rl_check('first', '10/10d refund_on_abort')"), 't', 'a charge');
	$victim->send("SELECT rl_check('second', 'fixed_window 10/10d from_first')\n;");
	await('a part of the reply', sub { return -e $begun });
	$watcher->await_waiting($victim_pid);
	$watcher->ask("SELECT pg_cancel_backend($victim_pid)");
	await('the wait to end', sub { return $watcher->waits_for($victim_pid) ne 'Extension' });
	append_to_file($goes_on, '');
	$victim->ends('', 'a cancel interrupts a call within its reply', '57014');
	await('the refund', sub { return $liar->requests == 3 });
	pass('the refund of an earlier charge is sent by a connection of its own');
	$victim->quit;
	is_deeply([ lost() ], [], 'it is not lost');
}

# A cancel that comes just before the reply: the reply comes first, so the charge is known, and refunded.
{
	my $proxy = TcpProxy->new($redis->port);
	my $victim = session($node);
	my $victim_pid = $victim->pid;
	my $key = new_key();
	my $held = sub { return $watcher->ask("SELECT 3 - remaining FROM rl_peek('$key', 'concurrent 3/1h', 0)") };

	$session->ask(q{
		CREATE TABLE parcels (customer int);
		CREATE TRIGGER each AFTER INSERT ON parcels REFERENCING NEW TABLE AS added FOR EACH STATEMENT
			EXECUTE FUNCTION rl_enforce('parcel:{customer}', '10/10d')});
	$victim->ask("SET ratelimit.redis_url = '" . $proxy->url . "'; SELECT take('another', 0)");
	new_log($node);
	$proxy->tell("interrupt $victim_pid");
	$victim->ends("SELECT rl_check('$key', 'concurrent 3/1h')", 'a cancel just before the reply to a call', '57014');
	is($held->(), 0, 'no unit is held');
	$victim->ask("BEGIN; SELECT take('$key', 5)");
	$proxy->tell("interrupt $victim_pid");
	$victim->ends("SELECT take('$key', 2)", 'the same in a transaction', '57014');
	$victim->ask('ROLLBACK');
	is(free($key), 10, 'both charges are refunded');
	$victim->ask("BEGIN; SAVEPOINT s; SELECT take('$key', 5); ROLLBACK TO s");
	$proxy->tell("interrupt $victim_pid");
	$victim->ends("SELECT take('$key', 2)", 'a cancel just before the reply to a refund ahead of a call', '57014');
	$victim->ask('ROLLBACK');
	is(free($key), 10, 'the savepoint is refunded');
	foreach my $n (1 .. 3)
	{
		$victim->ask("BEGIN; INSERT INTO orders VALUES (200 + $n, 'gil', 1); SAVEPOINT s");
		$proxy->tell("interrupt $victim_pid");
		$victim->ends("INSERT INTO orders VALUES (300 + $n, 'gil', 1); SET CONSTRAINTS ALL IMMEDIATE", 'the same in a row trigger', '57014');
		$victim->ask('ROLLBACK');
		is(orders('gil'), '10 10 10', 'the charges of both rows are refunded');
	}
	$proxy->tell("interrupt $victim_pid");
	$victim->ends('INSERT INTO parcels SELECT generate_series(1, 2000)', 'the same in a trigger FOR EACH STATEMENT', '57014');
	is($watcher->ask("SELECT count(*) FROM generate_series(1, 2000) n, rl_peek('parcel:' || n, '10/10d', 0) WHERE remaining < 10"), 0, 'no key stays charged');
	$proxy->tell("terminate $victim_pid");
	$victim->send("SELECT rl_check('$key', 'concurrent 3/1h')\n;");
	$watcher->await_end($victim_pid);
	is($held->(), 0, 'a session that is terminated so holds no unit');
	eval { $victim->quit };
	unlike(new_log($node), qr/could not refund/, 'no refund is lost');
}

# The reply to a call under a concurrent limit is lost, or the call never comes: its mark refunds what it has charged.
{
	my $proxy = TcpProxy->new($redis->port);
	my $victim = session($node);
	my $limits = 'concurrent 3/1h, fixed_window 10/10d from_first, token_bucket 10/10d, sliding_window 10/10d, 10/1000d, sliding_log 10/10d';
	my $text = "rl_limits '$limits'";
	my $left = sub { return $watcher->ask("SELECT string_agg(remaining::text, ' ') FROM rl_peek('$_[0]', '$limits', 0)") };
	my $marks = sub { return map { /^mark:(.*)/ } @{ $redis->cli('HKEYS', "rl:{$_[0]}") } };
	my %take = (
		rl_check => sub { return "SELECT source FROM rl_check('$_[0]', $text)" },
		rl_check_many => sub { return "SELECT min(source) FROM rl_check_many(ARRAY['$_[0]', 'other:$_[0]'], $text)" },
		rl_check_all => sub { return "SELECT min(source) FROM rl_check_all(ARRAY['$_[0]', 'other:$_[0]'], ARRAY[$text, '100/20d'])" });

	$victim->ask("SET ratelimit.redis_url = '" . $proxy->url . "'; SET ratelimit.command_timeout = '1s'");
	foreach my $form (sort keys %take)
	{
		my ($key, $kept) = (new_key(), new_key());

		$watcher->ask($take{$form}->('loads the script'));
		$victim->ask("SELECT take('another', 0); BEGIN; SAVEPOINT s");
		$proxy->tell('lose all');
		$victim->ends($take{$form}->($key), "$form: the reply is lost", 'PT504');
		is($left->($key), '2 9 9 9 9 9', 'it was charged');
		is(scalar(() = $marks->($key)), 1, 'it has a mark');
		my $monitor = RedisMonitor->new($redis);
		$victim->ask("ROLLBACK TO s; SELECT take('another', 0)");
		is($left->($key), '3 10 10 10 10 10', 'the next command refunds it');
		my ($refund) = grep { $_->[0] eq 'EVALSHA' && grep { $_ eq '-1' } @$_ } $monitor->commands;
		$watcher->ask($take{$form}->($key));
		$redis->cli(@$refund) foreach 1 .. 2;
		is($left->($key), '3 9 9 9 9 9', 'the same refund again refunds nothing');
		$proxy->tell('lose all');
		is($victim->ask("SET LOCAL ratelimit.on_error = allow; SAVEPOINT s; " . $take{$form}->($kept)), 'fail_open', 'an action that happens although the reply is lost');
		$victim->ask("RELEASE s; SELECT take('another', 0)");
		is($left->($kept), '2 9 9 9 9 9', 'it holds its unit');
		$victim->ask('COMMIT');
		is($left->($kept), '3 9 9 9 9 9', 'until the transaction ends');
		is_deeply([ $marks->($kept) ], [], 'the mark is gone');

		# Without a reply, and without a charge.
		$key = new_key();
		$victim->ask("SELECT take('another', 0); BEGIN; SAVEPOINT s");
		$proxy->tell('drop');
		$victim->ends("SET LOCAL ratelimit.command_timeout = '100ms'; " . $take{$form}->($key), "$form: the call does not come", 'PT504');
		is_deeply([ $marks->($key) ], [], 'it has left no mark');
		$victim->ask("ROLLBACK TO s; SELECT take('another', 0)");
		my ($mark) = $marks->($key);
		like($mark, qr/^[0-9a-f]{16}$/, 'the refund leaves the mark');
		cmp_ok($redis->cli('PTTL', "rl:{$key}"), '>', 59_000, 'for a minute');

		# The call comes late: another one, with this mark.
		$monitor->commands;
		$watcher->ask($take{$form}->($key));
		my ($call) = grep { $_->[0] eq 'EVALSHA' && grep { /^-?\d+ [0-9a-f]{16}$/ } @$_ } $monitor->commands;
		foreach my $late (1, 0)
		{
			my $with = $late ? $mark : 'f' x 16;

			eval { $redis->cli(map { s/^(-?\d+ )[0-9a-f]{16}$/$1$with/r } @$call) };
			is($left->($key), $late ? '3 9 9 9 9 9' : '2 8 8 8 8 8', $late ? 'the late call takes nothing' : 'with another mark it does');
		}
		$victim->ask('COMMIT');
	}
	$victim->quit;
	is_deeply([ lost() ], [], 'no refund is lost');
}

# After a call that is not answered, there is no connection for the refund.
{
	my $key = new_key();

	$session->ask("BEGIN; SELECT take('$key', 5); SET LOCAL ratelimit.command_timeout = '100ms'");
	$redis->pause;
	$session->ask("SELECT take('$key', 1)");
	is(join(' ', $session->error =~ /(?:ERROR|FATAL|PANIC|WARNING):  (\w+)/g), 'PT504', 'a call that is not answered');
	$session->ask('ROLLBACK');
	$redis->resume;
	like(free($key), qr/^(9|10)$/, 'the refund arrives when Redis answers');
	is_deeply([ lost() ], [], 'it is not lost');
}

#
# Redis has lost its data or its scripts, or redis_url has changed
#

{
	my $key = new_key();

	$session->ask("BEGIN; SELECT take('$key', 5)");
	$redis->restart;
	is($watcher->ask("SELECT take('$key', 4)"), 'redis', 'another session takes quota of a Redis that has lost its data');
	$session->ends('ROLLBACK', 'ROLLBACK after Redis was killed raises no error');
	is(free($key), 6, 'the refund does not free quota of another session');
	is_deeply([ lost() ], [], 'no refund is lost after the kill');
	is($session->ask("SELECT take('$key', 1)"), 'redis', 'the session still works after the kill');

	# Flushed scripts.
	in_time($node, $watcher, sub {
		$key = new_key();
		$session->ask("BEGIN; SELECT count(take('$key:' || n, 5)) FROM generate_series(1, 700) n");
		$redis->cli('SCRIPT', 'FLUSH');
		$session->ask('ROLLBACK');
	});
	is($watcher->ask("SELECT string_agg(DISTINCT free('$key:' || n), ',') FROM generate_series(1, 700) n"), 10, 'ROLLBACK after SCRIPT FLUSH refunds');
	$session->ask("BEGIN; SAVEPOINT s; SELECT count(take('$key:' || n, 5)) FROM generate_series(1, 700) n; ROLLBACK TO s");
	$redis->cli('SCRIPT', 'FLUSH');
	$session->ask("SELECT take('another', 0)");
	is($watcher->ask("SELECT string_agg(DISTINCT free('$key:' || n), ',') FROM generate_series(1, 700) n"), 10, 'ROLLBACK TO after SCRIPT FLUSH refunds');
	$session->ask('COMMIT');
	is_deeply([ lost() ], [], 'no refund is lost after SCRIPT FLUSH');
}

# The script's source is sent only to a server that does not have it.
{
	my $rolled_back = sub {
		my ($n, @more) = @_;
		my $key;

		in_time($node, $watcher, sub {
			$key = new_key();
			$session->ask("BEGIN; SELECT count(take('$key:' || n, 5)) FROM generate_series(1, $n) n");
			$_->() foreach @more;
			$session->ask('ROLLBACK');
		});
		return $watcher->ask("SELECT string_agg(DISTINCT free('$key:' || n), ',') FROM generate_series(1, $n) n");
	};
	my $reset = sub { $redis->cli('CONFIG', 'RESETSTAT') };

	$watcher->ask("SELECT free('another')");
	is($rolled_back->(1), 10, 'a first ROLLBACK refunds');
	is($rolled_back->(3, $reset), 10, 'another ROLLBACK refunds');
	is($redis->calls('eval'), 0, 'a ROLLBACK sends no source of a known script');
	cmp_ok($redis->calls('evalsha'), '>=', 3, 'a ROLLBACK sends the name of the script');
	is($rolled_back->(700, $reset, sub { $redis->cli('SCRIPT', 'FLUSH') }), 10, 'ROLLBACK after SCRIPT FLUSH refunds with a script that was known');
	cmp_ok($redis->calls('eval'), '>=', 1, 'this ROLLBACK sends the source');

	# Scripts are flushed repeatedly while transactions end.  Their source may take too long on a busy machine.
	my $times = is_long() ? 3 : 1;
	my @free = $redis->while_flushing(sub { return map { $rolled_back->(700) } 1 .. $times });
	is_deeply(\@free, [ (10) x $times ], 'ROLLBACK refunds while scripts are flushed repeatedly');
	is_deeply([ lost() ], [], 'no refund is lost while scripts are flushed');
}

{
	my $other = RedisServer->new->start;
	my $monitor = RedisMonitor->new($other);
	my $key = new_key();
	my $set = "SET LOCAL ratelimit.redis_url = '" . $other->url . "'";

	$session->ask("BEGIN; SELECT take('$key', 5); $set; ROLLBACK");
	is(free($key), 10, 'with another redis_url the refund goes to the first server');
	$session->ask("BEGIN; SELECT take('$key', 1); $set; SELECT 1/0");
	$session->ask('ROLLBACK');
	is(free($key), 10, 'the same at an error');
	is_deeply([ $monitor->commands ], [], 'the other server receives no command');
	$key = new_key();
	$session->ask("BEGIN; SELECT take('$key', 5); SAVEPOINT s; $set; SELECT take('$key', 3); ROLLBACK TO s; SELECT take('$key', 1); ROLLBACK");
	is(free($key), 10, 'the same in a savepoint');
	is($watcher->ask("$set" =~ s/LOCAL//r . "; SELECT free('$key')"), 10, 'and one for the other server to that');
	$watcher->ask('RESET ratelimit.redis_url');
	is_deeply([ lost() ], [], 'no refund is lost');
}

# A connection is lost within a transaction, and the call that connects again is
# canceled before the server has answered its SELECT.
{
	my $victim = session($node);
	my $victim_pid = $victim->pid;

	$victim->ask("SET ratelimit.redis_url = '" . $redis->url(db => 3) . "'; SELECT take('db', 0)");
	$victim->ask("BEGIN; SELECT take('db', 5)");
	$redis->cli('ACL', 'SETUSER', 'default', '-select');
	$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
	$redis->pause;
	$victim->send("SELECT take('db', 1)\n;");
	$watcher->await_waiting($victim_pid);
	$watcher->ask("SELECT pg_cancel_backend($victim_pid)");
	await('the wait to end', sub { return $watcher->waits_for($victim_pid) ne 'Extension' });
	$redis->resume;
	$victim->ends('', 'canceled while connecting', '57014');
	$victim->ask("ROLLBACK");
	$victim->ends("SELECT take('db', 1)", 'the next call finds that SELECT is not permitted', 'PT504');
	is($redis->cli('EXISTS', 'rl:{db}'), 0, 'no key is in database 0');
	$redis->cli('ACL', 'SETUSER', 'default', '+select');
	await('the refund', sub { return $victim->ask("SELECT free('db')") =~ /^(9|10)$/ });
	pass('the refund arrives in its database when SELECT is permitted');
	$victim->quit;
}

# A key of another type does not prevent the refunds of other keys.
foreach my $how ('ROLLBACK', 'ROLLBACK TO')
{
	my ($key, $error);
	my $log = in_time($node, $watcher, sub {
		$key = new_key();
		$session->ask("BEGIN; SAVEPOINT s; SELECT count(take('$key:' || n, 5)) FROM generate_series(1, 800) n");
		$redis->cli('DEL', "rl:{$key:$_}") foreach 7, 780;
		$redis->cli('SET', "rl:{$key:$_}", 'a string') foreach 7, 780;
		$session->ask($how eq 'ROLLBACK' ? 'ROLLBACK' : "ROLLBACK TO s; SELECT take('$key', 1)");
		$error = $session->error;
		$session->ask('COMMIT') if $how ne 'ROLLBACK';
	});
	my @lost = lost(0, $log);

	is($error, '', "$how with two keys that are not a hash raises no error");
	is($watcher->ask("SELECT string_agg(DISTINCT free('$key:' || n), ',') FROM generate_series(1, 800) n WHERE n NOT IN (7, 780)"),
		10, "$how refunds the other keys");
	is(sum0(map { $_->[0] } @lost), 10, "$how: the log shows the number of charges");
	like($lost[0][1], qr/^Redis answered with an error: WRONGTYPE/, "$how: the log shows the reason");
}

#
# Two stores
#

sub local_free { my ($key) = @_; return $watcher->ask("SET ratelimit.store = local; SELECT free('$key'); RESET ratelimit.store"); }

foreach my $end ('ROLLBACK', 'COMMIT', 'SAVEPOINTS')
{
	my $key = new_key();
	my $take = sub {
		my ($quota, $source) = @_;
		$session->ask('SAVEPOINT s') if $end eq 'SAVEPOINTS';
		is($session->ask("SELECT take('$key', $quota)"), $source, "$end: $source grants $quota");
		$session->ask('ROLLBACK TO s') if $end eq 'SAVEPOINTS' && $quota > 1;
	};

	$session->ask("SET ratelimit.on_error = local; BEGIN");
	$take->(4, 'redis');
	$redis->cli('REPLICAOF', '127.0.0.1', 1);
	$take->(5, 'local');
	$take->(1, 'local');
	$redis->cli('REPLICAOF', 'NO', 'ONE');
	$take->(2, 'redis');
	$take->(1, 'redis');
	$session->ask($end eq 'SAVEPOINTS' ? 'COMMIT' : $end);
	$session->ask('RESET ratelimit.on_error');
	# Refunds of a throttle leave out the time in which its charges overlapped.
	is(free($key) =~ s/^8 9$/9/r, $end eq 'ROLLBACK' ? 10 : $end eq 'COMMIT' ? 3 : 9, "$end: the quota in Redis");
	is(local_free($key), $end eq 'ROLLBACK' ? 10 : $end eq 'COMMIT' ? 4 : 9, "$end: the quota in the local store");
	is_deeply([ lost() ], [], "$end: no refund is lost");
}
{
	my $key = new_key();

	# A refund that could not be sent waits until Redis can be reached.
	$session->ask("SET ratelimit.on_error = local; BEGIN; SAVEPOINT s; SELECT take('$key', 5); ROLLBACK TO s");
	rename $redis->socket, $redis->socket . '.away' or die "could not rename the socket: $!";
	$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal', 'SKIPME', 'yes');
	is($session->ask("SELECT take('$key', 3)"), 'local', 'no server listens on the socket');
	rename $redis->socket . '.away', $redis->socket or die "could not rename the socket: $!";
	is(free($key), 5, 'Redis has not received the refund');
	is($session->ask("SELECT take('$key', 1)"), 'redis', 'Redis can be reached again');
	is(free($key), 9, 'Redis has received the refund');
	$session->ask('COMMIT; RESET ratelimit.on_error');
	is(local_free($key), 7, 'the charge in the local store stays');
	is_deeply([ lost() ], [], 'no refund is lost');
}
{
	my $key = new_key();

	# The local store works without Redis.
	$session->ask("BEGIN; SAVEPOINT s; SELECT take('$key', 5); ROLLBACK TO s;
		SET LOCAL ratelimit.store = local; SET LOCAL ratelimit.command_timeout = '50ms'");
	$redis->pause;
	is($session->ask("SELECT take('$key', 5)"), 'local', 'the local store decides although a refund is queued for Redis');
	is($session->ask("SELECT free('$key')"), 5, 'rl_peek reads the local store');
	$session->ask('ROLLBACK');
	$redis->resume;
	is($session->error, '', 'ROLLBACK raises no error');
	is(local_free($key), 10, 'the charge in the local store is refunded');
	is_deeply([ map { $_->[0] } lost(1) ], [5], 'the log shows the refund for Redis, which it had no time to answer');
}

#
# The denial cache
#

# While quota of hundreds of keys is refunded, another session asks for the last key.
{
	my $asker = session($node);
	my $limit = 'fixed_window 5/1h refund_on_abort';
	my ($meanwhile, $wrong) = (0, 0);

	$session->ask(qq{
		-- Asks for a key when the quota of the other key has been refunded.
		CREATE FUNCTION ask_when(other text, key text) RETURNS boolean LANGUAGE plpgsql AS \$\$
		BEGIN
			WHILE (SELECT remaining FROM rl_peek(other, '$limit', 0)) < 5 LOOP
			END LOOP;
			RETURN rl_allow(key, '$limit', 5);
		END \$\$});
	foreach my $try (1 .. 100)
	{
		last if $try > 5 && $meanwhile;
		my ($oldest, $newest) = (new_key(), new_key());

		# The newest charge is refunded first.
		$session->ask("BEGIN; SELECT rl_allow('$oldest', '$limit', 5);
			SELECT count(take('cached:' || n, 1)) FROM generate_series(1, 600) n; SELECT rl_allow('$newest', '$limit', 5)");
		$asker->send("SELECT ask_when('$newest', '$oldest')\n;");
		$session->ask('ROLLBACK');
		next if $asker->ask('') eq 't';
		settled($watcher);
		next if lost(1);
		$meanwhile++;
		$wrong++ if $session->ask("SELECT rl_allow('$oldest', '$limit', 5)") ne 't';
	}
	cmp_ok($meanwhile, '>', 0, "a key is refused while other keys are refunded: $meanwhile times");
	is($wrong, 0, 'no key is refused after its own refund');
	$asker->quit;
	$redis->cli('FLUSHALL');
}

#
# Many charges
#

my $bytes = q{SELECT coalesce(sum(total_bytes), 0) FROM pg_backend_memory_contexts WHERE name LIKE 'rate-limit charges'};

# Waits until all refunds of the session are sent: those that the list has no room for go ahead of its next calls.
# Returns how many are lost, because Redis had no time to answer them, and the others.
sub all_sent
{
	await('the refunds of the session', sub { $session->ask("SELECT take('another', 0)"); return $session->ask($bytes) eq '0' });
	settled($watcher);
	my $log = new_log($node);
	return (sum0(map { $_->[0] } lost(1, $log)), scalar(lost(0, $log)), $log);
}

# There is room for the charges of eight limits of 8,192 keys.  In each run, 046_concurrent has more.
if (is_long())
{
	my $eight = join ', ', map { "fixed_window 5/${_}d refund_on_abort" } 11 .. 18;
	my $many = new_key();

	$session->ask("BEGIN; SELECT count(rl_allow('$many:' || n, '$eight')) FROM generate_series(1, 8200) n");
	my $full = $session->ask($bytes);
	$session->ask("SELECT count(rl_allow('$many:' || n, '$eight')) FROM generate_series(8193, 8200) n");
	is($session->ask($bytes), $full, "further charges need no more memory than $full bytes");
	cmp_ok($full, '<', 64 * 1024 * 1024, 'the charges need less than 64 MB');
	$session->ends('ROLLBACK', 'ROLLBACK with more charges than there is room for raises no error');
	my ($late, $lost, $log) = all_sent();
	my $used = $session->ask("SELECT count(*) FROM generate_series(1, 8200) n, rl_peek('$many:' || n, 'fixed_window 5/11d', 0) WHERE remaining < 5");
	cmp_ok($used, '>=', 8, 'charges without room stay');
	cmp_ok($used, '<=', 8 + $late, 'all charges that had room are refunded');
	is(count_of(qr/too many rate-limit charges in one transaction to refund all of them/, $log), 1, 'the log has one line about the room');
	is($lost, 0, 'no other refund was lost');
}

# Five thousand entries of a log with older entries.
foreach my $how ('ROLLBACK', is_long() ? "ROLLBACK TO s; SELECT take('another', 0); COMMIT" : ())
{
	my $key = new_key();
	my $limit = 'sliding_log 100000/1d refund_on_abort';

	$session->ask("SELECT count(rl_allow('$key', '$limit', 2)) FROM generate_series(1, 2500)");
	my $take = timed("BEGIN; SAVEPOINT s; SELECT count(rl_allow('$key', '$limit')) FROM generate_series(1, 5000);");
	my $end = timed("$how;");
	my ($late, $lost) = all_sent();
	my $left = $watcher->ask("SELECT remaining FROM rl_peek('$key', '$limit', 0)");
	cmp_ok($left, '<=', 95_000, "$how: other entries stay");
	cmp_ok($left, '>=', 95_000 - $late, "$how: five thousand entries of a log are refunded");
	is($lost, 0, "$how: no refund of the log is lost");
	note "$how: taken in $take ms, refunded in $end ms";
	cmp_ok($end, '<', 2 * $take, "$how: the refund takes at most twice as long as the charge") if $late == 0;
}

# Many transactions.
$session->ask(qq{
	CREATE PROCEDURE churn(n int) LANGUAGE plpgsql AS \$\$
	BEGIN
		FOR i IN 1 .. n LOOP
			PERFORM rl_allow('churn:' || i % 50, '$all');
			BEGIN
				PERFORM rl_allow('churn:' || i % 50, '$all', 2);
				IF i % 3 > 0 THEN
					RAISE EXCEPTION 'raised';
				END IF;
			EXCEPTION WHEN raise_exception THEN
				NULL;
			END;
			IF i % 5 = 0 THEN
				COMMIT;
				PERFORM rl_reset('churn:' || i % 50);
			ELSE
				ROLLBACK;
			END IF;
		END LOOP;
	END \$\$});
foreach my $store (qw(local redis))
{
	my ($n, $kb) = $store eq 'local' ? (is_long() ? 50_000 : 20_000, 256) : (is_long() ? 4000 : 1500, 200);

	$session->ask("SET ratelimit.store = $store; CALL churn(1000)");
	my $before = $session->private_kb;
	$session->ends("CALL churn($n)", "$n transactions ($store)");
	my $more = $session->private_kb - $before;
	cmp_ok($more, '<', $kb, "$n transactions ($store) need no more memory than before ($more kB)");
	$session->ask('RESET ratelimit.store');
}
is_deeply([ lost() ], [], 'no refund of these transactions is lost');

done_testing();
