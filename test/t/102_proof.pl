# The mutants of the models in proof/ (src/README.md): the run by which script/prove refutes each is
# played with a build that is wrong at the same place, and breaks the same promise there.  The
# right build keeps it in the same run.
#
# All mutants have such a build, which takes a second or two: without RATELIMIT_LONG, only the first of
# one model is built.  What the models leave open is chosen: a throttle or a window,
# and sizes for which one unit too many is certain.
#
# Runs once: what the models say depends on no version.
use RatelimitTest;
use IO::Socket::UNIX;
use LyingServer;
use TcpProxy;

use constant { SECOND => 1_000_000, START => 1_700_000_000_000_000 };

my $root = "$FindBin::RealBin/../..";

#
# Servers
#

my $redis = RedisServer->new->start;
my $folder = PostgreSQL::Test::Utils::tempdir_short;
my $clocks = preload("$root/test/clocks.c") // die 'there is no C compiler';
my $library = 'ratelimit';
my $node;

set_clock(boot => 0);
with_clocks($clocks, sub {
	$node = shared_node($redis, 'ratelimit.retry_interval = 1h', 'ratelimit.command_timeout = 180s');
}, SUSPENDED => 'boot');

# The sessions of a run, and those of earlier runs, which the next one uses with new backends.
my (@sessions, @idle);

# Restarts the server with another build.
sub use_library
{
	my ($new) = @_;

	$_->quit foreach splice @idle;
	$node->safe_psql('postgres', "UPDATE pg_proc SET probin = '$new' WHERE probin = '$library'");
	$node->append_conf('postgresql.conf', "shared_preload_libraries = '$new'");
	with_clocks($clocks, sub { start_node($node, 'restart') }, SUSPENDED => 'boot');
	$library = $new;
	return;
}

# Returns a server that passes requests on to Redis, and the replies back.  If there is a file
# with its name, the next reply to a script that was run is disturbed: with the ending ".lose"
# the connection ends in its place, with ".hold" it waits while there is a file ".holds".  What
# the function returns for a request is sent in place of Redis's reply.
my $relays = 0;
sub relay
{
	my ($instead, %how) = @_;
	my $file = "$folder/relay" . ++$relays;
	my $to;
	my $server = LyingServer->new(sub {
		my (@request) = @_;
		my $reply = $instead && $instead->(@request);

		return $reply if $reply;
		$to ||= IO::Socket::UNIX->new(Peer => $redis->socket) or die "could not connect: $!";
		print $to '*' . @request . "\r\n", map { '$' . length($_) . "\r\n$_\r\n" } @request;
		$reply = read_reply($to);
		return $reply if $request[0] !~ /^EVAL/ || $reply =~ /^-NOSCRIPT/;
		return undef if unlink "$file.lose";
		return $reply unless rename "$file.hold", "$file.holds";
		return (sub { return !-e "$file.holds" }, $reply);
	}, %how);
	$server->{file} = $file;
	return $server;
}

# Returns the bytes of a reply.
sub read_reply
{
	my ($from) = @_;
	my $reply = $from->getline // die 'no reply';
	my ($type, $n) = $reply =~ /^(.)(-?\d*)/;

	if ($type eq '$' && $n >= 0) { read $from, my $data, $n + 2; $reply .= $data; }
	if ($type eq '*') { $reply .= read_reply($from) foreach 1 .. $n; }
	return $reply;
}

sub disturb { my ($relay, $how) = @_; append_to_file("$relay->{file}.$how", ''); return; }

sub await_held { my ($relay) = @_; await('a reply', sub { return -e "$relay->{file}.holds" }); return; }

sub let_go { my ($relay) = @_; unlink "$relay->{file}.holds" or die "no reply is held: $!"; return; }

# Returns a session.
sub client
{
	my ($url, %settings) = @_;
	my $client = pop @idle // session($node);

	$settings{redis_url} = $url;
	$client->ask(join "\n", map { "SET ratelimit.$_ = '$settings{$_}';" } sort keys %settings);
	push @sessions, $client;
	return $client;
}

# Returns sessions of one server, each with its own way to Redis: the path of a socket.
sub clients
{
	my (@paths) = @_;
	my $link = "$folder/link";

	return map {
		symlink($_, "$link.new") && rename("$link.new", $link) or die "$link: $!";
		my $client = client("unix://$link");
		# It connects, and keeps its connection.
		$client->ask(q{SELECT rl_peek('connect', '5/1s')});
		die $client->error if $client->error ne '';
		$client
	} @paths;
}

# Sets the sessions' clocks to so many microseconds after the start.
sub at
{
	my ($us, @clients) = @_;

	foreach my $client (@clients)
	{
		$client->ask(sprintf q{SET ratelimit.debug_now = '%d'; SET ratelimit.debug_clock = '%d'}, START + $us, 1_000 * SECOND + $us);
	}
	return;
}

# Takes quota so many times.  Returns how much was allowed.
sub take
{
	my ($client, $key, $limits, $n, $quota) = @_;

	$quota ||= 1;
	return $quota * $client->ask("SELECT count(*) FILTER (WHERE (rl_check('$key', '$limits', $quota)).allowed) FROM generate_series(1, $n)");
}

sub source { my ($client, $key, $limits) = @_; return $client->ask("SELECT source FROM rl_check('$key', '$limits')"); }

sub used { my ($client, $key, $limits) = @_; return $client->ask("SELECT capacity - remaining FROM rl_peek('$key', '$limits', 0)"); }

#
# Runs
#
# Each returns whether the promise was kept, and what was seen.
#

my %runs;
my $throttle = '1000/1s burst 1000 lease 50ms';
my $window = 'fixed_window 1000/1h lease 50ms';

# Returns sessions that are servers of their own where leases are concerned, because they write
# the path of Redis in different ways.
sub two_servers
{
	my ($path) = @_;
	my ($one) = clients($path || $redis->socket);

	return ($one, client('unix:///' . $redis->socket));
}

# The first server gets a lot, for which 17 calls take 10 or more.
sub get_lot
{
	my ($key, $limits, $quota, @clients) = @_;

	at(0, @clients);
	return take($clients[0], $key, $limits, 17, $quota);
}

sub within { my ($units, $most) = @_; return ($units <= $most, "$units units of $most"); }

# The first server uses its lot ten seconds later, when the other has taken nearly all that there is.
sub use_lot_late
{
	my ($key) = @_;
	my ($one, $two) = two_servers();

	get_lot($key, $throttle, 20, $one, $two);
	at(10 * SECOND, $one, $two);
	return within(take($two, $key, $throttle, 95, 10) + take($one, $key, $throttle, 30, 10), 1000);
}

$runs{lease}{NOT_REDUCED} = {
	change => [ 'src/algorithm/limits.c', 'limit->capacity -= limit->held_back;', '' ],
	run => sub {
		my ($key) = @_;
		my ($one, $two) = two_servers();
		my $limits = '1000/1s burst 200 lease 50ms';

		get_lot($key, $limits, 1, $one, $two);
		# All of it is replenished, and the lot can still be used.
		at(44_000, $one, $two);
		return within(take($two, $key, $limits, 250) + take($one, $key, $limits, 50), 200);
	} };
$runs{lease}{NEVER_ENDS} = {
	change => [ 'src/shared/known.c', 'lot->ends = stale ? 0 : call->asked + length;', 'lot->ends = PG_INT64_MAX;' ],
	run => \&use_lot_late };
$runs{lease}{FROM_REPLY} = {
	change => [ 'src/shared/known.c', 'lot->ends = stale ? 0 : call->asked + length;', 'lot->ends = stale ? 0 : lease_now() + length;' ],
	run => sub {
		my ($key) = @_;
		my $relay = relay();
		my ($client) = clients($relay->path);
		my $window = 'fixed_window 1000/10d lease 50ms';

		set_clock(boot => '=' . 1000 * SECOND);
		take($client, $key, $window, 16);
		disturb($relay, 'hold');
		$client->send("SELECT rl_check('$key', '$window');");
		await_held($relay);
		set_clock(boot => '=' . 1010 * SECOND);
		let_go($relay);
		$client->ask('');
		my $source = source($client, $key, $window);
		set_clock(boot => 0);
		return ($source ne 'lease', "ten seconds later an action is decided by $source");
	} };
$runs{lease}{REFUND_ALL} = {
	change => [ 'src/redis/scripts/lease.lua', 'l:refund_charge(tonumber(at),', 'l:refund_charge(now,' ],
	run => \&use_lot_late };
$runs{lease}{OTHER_LIFE} = {
	change => [ 'src/redis/scripts/lease.lua', 'ARGV[a + CHARGE - 1] == life', 'true' ],
	run => sub {
		my ($key) = @_;
		my ($one, $two) = two_servers();

		get_lot($key, $window, 10, $one, $two);
		$two->ask("SELECT rl_reset('$key')");
		my $taken = take($two, $key, $window, 100, 10);
		at(10 * SECOND, $one, $two);
		return within($taken + take($one, $key, $window, 5, 10), 1000);
	} };
$runs{lease}{SENT_KEPT} = {
	change => [ 'src/decide.c', 'all->answer->usage.round_trips <= round_trips && ', '' ],
	run => sub {
		my ($key) = @_;
		my $relay = relay();
		my ($one) = two_servers($relay->path);
		my $taken = get_lot($key, $window, 10, $one);

		at(10 * SECOND, $one);
		disturb($relay, 'lose');
		$one->ask("SELECT rl_check('$key', '$window', 10)");
		is($one->state, 'PT504', 'a call whose reply is lost fails');
		return within($taken + take($one, $key, $window, 150, 10), 1000);
	} };
$runs{lease}{STALE_STORED} = {
	change => [ 'src/shared/known.c', 'charges, call->generation != lease->generation);', 'charges, false);' ],
	run => sub {
		my ($key) = @_;
		my $relay = relay();
		my ($asks, $resets) = clients($relay->path, $redis->socket);

		at(0, $asks, $resets);
		take($asks, $key, $window, 16);
		disturb($relay, 'hold');
		$asks->send("SELECT rl_check('$key', '$window');");
		await_held($relay);
		$resets->ask("SELECT rl_reset('$key')");
		let_go($relay);
		$asks->ask('');
		my $source = source($resets, $key, $window);
		return ($source ne 'lease', "after a reset an action is decided by $source");
	} };

my $counted = 'fixed_window 6/10d from_first';
my $reserved = "$counted, concurrent 1/1h";

# Runs calls about a key, each at a time in seconds.  Returns their answers, and the units that are counted.
sub reserve_run
{
	my ($key, @calls) = @_;
	my $client = client('unix://' . $redis->socket);
	my @answers;

	while (my ($at, $call) = splice @calls, 0, 2)
	{
		at($at * SECOND, $client);
		push @answers, $client->ask('SELECT ' . $call =~ s/KEY/'$key'/r);
	}
	return ([@answers], used($client, $key, $counted));
}

sub reserve { my ($id, $hold) = @_; return "allowed FROM rl_reserve(KEY, '$reserved', 2, '$id', " . ($hold || 10) . ')'; }

# A run whose promise is that the key then has so many units.
sub counts
{
	my ($change, $units, @calls) = @_;

	return { change => $change, run => sub {
			my ($key) = @_;
			my ($answers, $used) = reserve_run($key, @calls);

			return ($used == $units, "$used of $units units");
		} };
}

# A run whose promise is that the last call is answered by f.
sub ends_with_f
{
	my ($change, @calls) = @_;

	return { change => $change, run => sub {
			my ($key) = @_;
			my ($answers) = reserve_run($key, @calls);

			return ($answers->[-1] eq 'f', "@$answers");
		} };
}

# A call about the key and a last one.
my $two = sub { return "count(*) FROM (SELECT ARRAY[of, 'last ' || of] AS k FROM (SELECT KEY::text AS of) o) k, $_[0]" };
my $reserve_lua = 'src/redis/scripts/reserve.lua';
my $settle_lua = 'src/redis/scripts/settle.lua';

$runs{reservation} = {
	CHARGES_AGAIN => counts([ $reserve_lua, 'if record and record.ends > now then', 'if false then' ],
		1, 0, reserve('a'), 0, q{rl_settle(KEY, 'a', 1)}, 0, reserve('a')),
	FORGOTTEN => counts([ $settle_lua, 'record.ends = now + math.min(record.hold, 3600000000)', 'record.ends = now' ],
		1, 0, reserve('a'), 0, q{rl_settle(KEY, 'a', 1)}, 0, reserve('a')),
	NOT_WRITTEN => counts([ $settle_lua, "put_record(field, record)\n", "\n" ],
		1, 0, reserve('a'), 0, q{rl_settle(KEY, 'a', 1)}, 0, q{rl_settle(KEY, 'a', 1)}),
	SETTLES_AFTER_RESET => counts([ $settle_lua, q{l.gone = not l.by_time and life ~= l.life}, 'l.gone = false' ],
		2, 0, reserve('a'), 0, "rl_reset(KEY, '$reserved')", 0, "allowed FROM rl_check(KEY, '$counted', 2)", 0, q{rl_settle(KEY, 'a', 1)}),
	SETTLES_LATE => counts([ $settle_lua, 'elseif record.ends <= now then', 'elseif false then' ],
		2, 0, reserve('a', 2), 3, q{rl_settle(KEY, 'a', 1)}),
	TAKES_BACK => ends_with_f([ $settle_lua, 'if l.used == used then', 'if false then' ],
		0, reserve('a'), 0, "rl_reset(KEY, '$reserved')", 0.5, reserve('b'), 0.5, q{rl_extend(KEY, 'a')}),
	FIRST_NOT_CHARGED => counts([ $reserve_lua, "for _, key in ipairs(keys) do\n  hash, set, gone", "for _, key in ipairs({last}) do\n  hash, set, gone" ],
		2, 0, $two->("rl_reserve_all(k, '{$counted,$counted}', '{2,3}', 'a')")),
	FIRST_NOT_SETTLED => counts([ $settle_lua, "for _, key in ipairs(keys) do\n  hash, set, gone, longest, expiry", "for _, key in ipairs({keys[#keys]}) do\n  hash, set, gone, longest, expiry" ],
		1, 0, $two->("rl_reserve_all(k, '{$counted,$counted}', '{2,3}', 'a')"), 0, $two->("rl_settle_all(k, 'a', '{1}')")),
	UNIT_NOT_EXTENDED => ends_with_f([ $settle_lua, 'if l.held then', 'if false then' ],
		0, reserve('a', 2), 1, q{rl_extend(KEY, 'a')}, 2.5, reserve('b')) };

my $refunded = 'fixed_window 10/10d from_first refund_on_abort';

sub charge { my ($key, $quota) = @_; return "SELECT rl_check('$key', '$refunded', $quota);"; }

# A run of a transaction that keeps its five units.
sub keeps
{
	my ($change, $sql) = @_;

	return { change => $change, run => sub {
			my ($key) = @_;
			my $client = client('unix://' . $redis->socket);
			my $take = charge($key, 5);

			$client->ask("BEGIN; " . $sql =~ s/TAKE/$take/r . ' COMMIT');
			my $used = used($client, $key, $refunded);
			return ($used == 5, "$used of 5 units");
		} };
}

# A run in which a refund is sent ahead of a command, and its reply is disturbed.  Another session
# has five units, which no refund may take.
sub refunds_once
{
	my ($change, $how) = @_;

	return { change => $change, run => sub {
			my ($key) = @_;
			my $relay = relay();
			my ($client, $other) = clients($relay->path, $redis->socket);
			my $pid = $client->pid;

			take($other, $key, $refunded, 1, 5);
			$client->ask('BEGIN; SAVEPOINT s; ' . charge($key, 5) . ' ROLLBACK TO s; SAVEPOINT t');
			disturb($relay, $how);
			$client->send(charge("$key, other", 1));
			if ($how eq 'hold')
			{
				await_held($relay);
				$other->ask("SELECT pg_cancel_backend($pid)");
			}
			$client->ask('');
			is($client->state, $how eq 'hold' ? '57014' : 'PT504', "a refund is under way at an error ($how)");
			let_go($relay) if $how eq 'hold';
			$client->ask('ROLLBACK TO t; ' . charge("$key, other", 1) . ' COMMIT');
			my $used = used($other, $key, $refunded);
			return ($used == 5, "$used of 5 units");
		} };
}

# A run in which the end of a transaction cannot send a refund, or does not get the answer.  Another session has
# five units, which no refund may take.
sub overdue
{
	my ($change, $how) = @_;

	return { change => $change, run => sub {
			my ($key) = @_;
			my $refuses = "$folder/refuses";
			my $relay = relay(sub { return $_[0] =~ /^EVAL/ && unlink($refuses) ? "-LOADING Redis is loading the dataset in memory\r\n" : '' });
			my ($client, $other) = clients($relay->path, $redis->socket);

			take($other, $key, $refunded, 1, 5);
			$client->ask('BEGIN; ' . charge($key, 5));
			$how eq 'lose' ? disturb($relay, 'lose') : append_to_file($refuses, '');
			$client->ask('ROLLBACK');
			await('the refunds', sub { return $other->ask('SELECT refunds_overdue = 0 FROM rl_status()') eq 't' || used($other, $key, $refunded) < 5 });
			my $used = used($other, $key, $refunded);
			return ($used == 5, "$used of 5 units");
		} };
}

$runs{ledger} = {
	RELEASE_STAYS => keeps([ 'src/transaction.c', 'committed_to = Min(committed_to, level - 1);', ';' ],
		'SAVEPOINT s; TAKE RELEASE s; SAVEPOINT t; ROLLBACK TO t;'),
	COMMIT_REFUNDS => keeps([ 'src/transaction.c', 'if (aborts || grant->cause == RL_OF_CONCURRENT)', 'if (true)' ], 'TAKE'),
	INTERRUPTED_KEPT => refunds_once([ 'src/ledger.c', 'close_calls(unclosed, KEEP, &error);', 'unclosed = NULL;' ], 'hold'),
	SENT_AGAIN => refunds_once([ 'src/ledger.c', 'if (outcome == RL_REFUND_UNSENT && (unsent == KEEP',
			'if ((outcome == RL_REFUND_UNSENT || outcome == RL_REFUND_SENT) && (unsent == KEEP' ], 'lose'),
	SENT_IS_OVERDUE => overdue([ 'src/ledger.c', '(outcome == RL_REFUND_SENT && entry->charge.by_mark != 0);', 'outcome == RL_REFUND_SENT;' ], 'lose'),
	TAKEN_STAYS => overdue([ 'src/shared/overdue.c', "\tremove_entry(target, at);\n\treturn true;", "\treturn true;" ], 'refuse'),
	REDIRECT_IS_DONE => {
		change => [ 'src/redis/refunds.c', 'set_outcome(keys, n, RL_REFUND_LATER);', 'set_outcome(keys, n, RL_REFUND_DONE);' ],
		run => sub {
			my ($key) = @_;
			my $moves = "$folder/moves";
			# The first that is asked while there is the file names the other as the owner of the slot.
			my @nodes = map {
				my $other = 1 - $_;

				relay(sub { return $_[0] =~ /^EVAL/ && unlink($moves) ? "-MOVED 1 127.0.0.1:" . slurp_file("$folder/port$other") . "\r\n" : '' }, tcp => 1)
			} 0, 1;

			foreach my $i (0, 1)
			{
				unlink "$folder/port$i";
				append_to_file("$folder/port$i", $nodes[$i]->port);
			}
			my $client = client($nodes[0]->url);
			$client->ask('BEGIN; ' . charge($key, 5));
			new_log($node);
			append_to_file($moves, '');
			$client->ask('ROLLBACK');
			ok(!-e $moves, 'the refund is redirected');
			settled($client);
			my $used = used(client('unix://' . $redis->socket), $key, $refunded);
			my $logged = new_log($node) =~ /could not refund/ ? 1 : 0;
			return ($used == 0 || $logged, "$used units are left, $logged are in the log");
		} } };

#
# The breaker
#

my $call = q{SELECT source FROM rl_check('breaker', 'fixed_window 1000000/10d from_first')};
my $watcher;

# Returns the state of the breaker.
sub breaker { return $watcher->ask('SELECT breaker FROM rl_status()'); }

# Returns a proxy, and so many sessions that have a connection through it.
sub proxied
{
	my ($n) = @_;
	my $proxy = TcpProxy->new($redis->port);
	my @clients = map { via($proxy) } 1 .. $n;

	$watcher = via($proxy, store => 'local');
	$_->ask($call) foreach @clients;
	return ($proxy, @clients);
}

sub via { my ($proxy, %settings) = @_; return client($proxy->url, on_error => 'allow', denial_cache => 'off', %settings); }

sub goes_on { my ($client) = @_; my $source = $client->ask($call); return ($source eq 'redis', "the call is answered by $source"); }

# In the wrong build a backend with a connection asks the breaker.
my $kept = "bool\t\tusable = rl_connection_is_usable(&node->conn);";

$runs{breaker} = {
	KEPT_ASKS => {
		change => [ 'src/redis/route.c', $kept, "int64 left; bool usable = rl_connection_is_usable(&node->conn) && strcmp(rl_breaker_state(node->conn.server, false, &left), \"closed\") == 0;" ],
		run => sub {
			my ($proxy, $works) = proxied(1);

			$proxy->tell('refuse');
			is(via($proxy)->ask($call), 'fail_open', 'no connection can be made');
			return goes_on($works);
		} },
	NO_PLACES => {
		change => [ 'src/shared/breaker.c', 'if (count_taken(entry, now) < places_of(entry))', 'if (true)' ],
		run => sub {
			my $silent = RedisServer->new->start;
			my @clients = map { client($silent->url(tcp => 1), denial_cache => 'off', connect_timeout => '180s') } 1 .. (is_long() ? 40 : 8);
			my $looks = client($silent->url(tcp => 1), store => 'local');
			my %pid = map { $_ => $_->pid } @clients;
			my $port = sprintf '%04X', $silent->port;

			$silent->pause;
			my $began = time;
			$_->send("$call;") foreach @clients;
			$looks->await_waiting($pid{$_}) foreach @clients;
			my $n = () = slurp_file('/proc/net/tcp') =~ /^ *\d+: \w+:\w+ \w+:$port 01 /mg;
			# A place is free again after a second.
			my $most = 4 * (1 + time - $began);
			$silent->resume;
			is($_->ask(''), 'redis', 'all are served') foreach @clients;
			return ($n <= $most, "$n connect at a time, and at most $most may");
		} },
	MOVE_UNKNOWN => {
		change => [ 'src/shared/breaker.c', 'may = entry->moved > connected;', 'may = false;' ],
		run => sub {
			my ($old, $new) = map { RedisServer->new->start } 1, 2;
			my $proxy = TcpProxy->new($old->port);
			my ($first, $other) = map { via($proxy) } 1, 2;

			is($_->ask($call), 'redis', 'a session has a connection') foreach $first, $other;
			$old->cli('REPLICAOF', '127.0.0.1', RedisServer::free_port());
			$proxy->tell('to ' . $new->port);
			is($first->ask($call), 'redis', 'a session connects the new master');
			return goes_on($other);
		} },
	PLACE_FOR_EVER => {
		change => [ 'src/shared/breaker.c', 'entry->places[number] = now + Min(PLACE_TIME, ((int64) rl_connect_timeout + rl_command_timeout) * 1000);', 'entry->places[number] = PG_INT64_MAX;' ],
		run => sub {
			my ($key, $right) = @_;
			my ($proxy, $stops) = proxied(1);
			my $pid = $stops->pid;

			$proxy->tell('reset');
			is($stops->ask($call), 'fail_open', 'a connection is broken');
			$proxy->tell('hold');
			$_->ask(q{SET ratelimit.connect_timeout = '2s'; SET ratelimit.command_timeout = '2s'; SET ratelimit.retry_interval = '200ms'}) foreach $stops, $watcher;
			is($stops->ask($call), 'fail_open', 'a new connection gets no answer');
			await('a backend that stops while it tries', sub {
				await('the end of the interval', sub { return breaker() eq 'half-open' });
				$stops->send("$call;");
				await('an attempt', sub { return breaker() eq 'trying' });
				kill 'STOP', $pid;
				await('the backend to stop', sub { return slurp_file("/proc/$pid/stat") =~ /^\d+ \(.*\) T/ });
				return 1 if breaker() eq 'trying';
				kill 'CONT', $pid;
				$stops->ask('');
				return 0;
			});
			$proxy->tell('accept');
			my $new = via($proxy, connect_timeout => '300ms', command_timeout => '300ms');
			my @seen = goes_on($new);
			for (my $try = 1; !$seen[0] && ($right || $try < 10); $try++)
			{
				@seen = goes_on($new);
			}
			kill 'CONT', $pid;
			$stops->ask('');
			return @seen;
		} } };

#
# The right build, and then each wrong one
#

# The runs of the model "persistence" are kills between two stores.  Its mutants are edits of test/mutations, for 039_persistence.
my @models = grep { $_ ne 'persistence' } map { m{([^/]+)\.pml$} } glob "$root/proof/*.pml";

is_deeply([ sort keys %runs ], \@models, 'all other models have runs');
{
	my %edits = map { ($_ => 1) } slurp_file("$root/test/mutations") =~ /^keep-(\S+) /mg;
	my %mutants = map { (tr/A-Z_/a-z-/r => 1) } slurp_file("$root/proof/persistence.pml") =~ /\bMUTANT_(\w+)/g;
	is_deeply([ grep { !$edits{$_} } sort keys %mutants ], [], 'each mutant of persistence is an edit');
}
foreach my $model (@models)
{
	my %mutants = map { ($_ => 1) } slurp_file("$root/proof/$model.pml") =~ /\bMUTANT_(\w+)/g;

	is_deeply([ sort keys %{ $runs{$model} } ], [ sort keys %mutants ], "$model: all mutants are built");
}

# Returns what a run returns.
my $keys = 0;
sub play
{
	my ($model, $mutant, $right) = @_;
	my @seen = $runs{$model}{$mutant}{run}->('key ' . ++$keys, $right);

	foreach my $client (splice @sessions)
	{
		$client->reconnect;
		push @idle, $client;
	}
	return @seen;
}

sub each_mutant
{
	my ($code) = @_;

	foreach my $model (@models)
	{
		$code->($model, $_) foreach sort keys %{ $runs{$model} };
	}
	return;
}

each_mutant(sub {
	my ($model, $mutant) = @_;
	my ($kept, $seen) = play($model, $mutant, 1);

	ok($kept, "$model, the run of $mutant: the right build keeps the promise: $seen");
});
my $built = 0;
each_mutant(sub {
	my ($model, $mutant) = @_;

	return if !is_long() && ($model ne 'lease' || $built++);
	use_library(wrong_library(@{ $runs{$model}{$mutant}{change} }));
	my ($kept, $seen) = play($model, $mutant, 0);
	ok(!$kept, "$model, $mutant: the wrong build breaks the promise: $seen");
});

done_testing();
