# Everything at once: clients of PostgreSQL servers make every kind of call while Redis, the servers, their
# connections and their clocks fail.  Then the checks of SoakChecks read what the clients have written, and
# processes are compared with those before.  Prints a table.
#
# script/soak runs this for longer: RATELIMIT_SOAK_MINUTES is how long, RATELIMIT_SOAK_SETUP is single (Redis with an
# append-only file, behind a proxy), cluster, sentinel or local (one server, whose local store keeps its counts),
# RATELIMIT_SOAK_SERVERS is the number of PostgreSQL servers, and RATELIMIT_SOAK_WRONG names a wrong build, which must
# be found.  RATELIMIT_SEED repeats the choices.
#
# Redis loses nothing that it has answered, unless a replica takes over that did not have it.  After that,
# spans begin anew, and ids may be charged again; sums are not checked.
#
# Runs once: a round of it, or a minute in the long form.
use RatelimitTest;
use Engines;
use LeaseClients qw(create_act backends);
use RedisCluster;
use SoakChecks;
use SoakClients;
use TcpProxy;
use Time::HiRes qw(sleep time);

use constant { CLIENTS => 12, SECONDS => 5 };

my $seed = seed();
my $minutes = $ENV{RATELIMIT_SOAK_MINUTES} || (is_long() ? 1 : 0.05);
my $setup = $ENV{RATELIMIT_SOAK_SETUP} || 'single';
my $servers = $setup eq 'local' ? 1 : $ENV{RATELIMIT_SOAK_SERVERS} || 2;
my $wrong = $ENV{RATELIMIT_SOAK_WRONG};
my @aof = ('--appendonly', 'yes', '--appendfsync', 'always', '--auto-aof-rewrite-min-size', '16mb', '--repl-diskless-sync-delay', '0');

# Builds that are wrong in one line, and the checks that can find them.  Others fail for other reasons: the worker for
# overdue refunds loads the right library too, which is an error.
my $finds = $wrong && $wrong eq 'breaker' ? qr/cut off/ : qr/span|each id|sums/;
my %wrong = (
	'lease-capacity' => [ 'src/algorithm/limits.c', 'limit->capacity -= limit->held_back;', '' ],
	'settle-twice' => [ 'src/redis/scripts/settle.lua', "record.status = 'settled:' .. ARGV[FIRST + #KEYS - 1]\n", "lines = {record.charges}\n" ],
	'level-not-charged' => [ 'src/redis/scripts/reserve.lua', "for _, key in ipairs(keys) do\n  hash, set, gone", "for _, key in ipairs({last}) do\n  hash, set, gone" ],
	'refund-after-reset' => [ 'src/redis/scripts/settle.lua', 'l.gone = not l.by_time and life ~= l.life', 'l.gone = false' ],
	'forgotten-id' => [ 'src/redis/scripts/reserve.lua', 'if record and record.ends > now then', 'if record and record.ends < now then' ],
	'lost-states' => [ 'src/shared/recover.c', 'insert_cell(&found, starts[i].cell);', 'if (i % 10 != 9) insert_cell(&found, starts[i].cell);' ],
	'breaker' => [ 'src/redis/route.c', "bool\t\tusable = rl_connection_is_usable(&node->conn);",
		"int64 left; bool usable = rl_connection_is_usable(&node->conn) && strcmp(rl_breaker_state(node->conn.server, false, &left), \"closed\") == 0;" ]);

foreach my $name (sort keys %wrong)
{
	my ($file, $right) = @{ $wrong{$name} };

	is(scalar(() = slurp_file("$FindBin::RealBin/../../$file") =~ /\Q$right\E/g), 1, "$file has the line that $name changes");
}

#
# Redis, and the servers
#

# The Redis servers, those that are masters, the Sentinels, the proxy.
my (@redis, @masters, @sentinels, $cluster, $proxy);

sub start_redis
{
	return '' if $setup eq 'local';
	if ($setup eq 'cluster')
	{
		$cluster = RedisCluster->new(masters => 3, replicas => 1, args => sub { return @aof });
		@redis = $cluster->servers;
		@masters = $cluster->masters;
		return $cluster->url;
	}
	@redis = map { RedisServer->new(args => \@aof)->start } 0 .. ($setup eq 'sentinel' ? 1 : 0);
	@masters = $redis[0];
	if ($setup eq 'single')
	{
		$proxy = TcpProxy->new($redis[0]->port);
		return $proxy->url;
	}
	follow($redis[1], $redis[0]);
	@sentinels = RedisServer::sentinels($redis[0], 2000, 4000);
	return RedisServer::sentinel_url(@sentinels);
}

sub follow
{
	my ($replica, $master) = @_;

	$replica->cli('REPLICAOF', '127.0.0.1', $master->port);
	await('the replica', sub { return $replica->follows });
	return;
}

sub role { my ($redis) = @_; return $redis->pid && eval { $redis->field('replication', 'role') } || ''; }

# Waits until Redis is as it should be.  Returns true if a replica has taken over.
sub settle_redis
{
	$_->start foreach grep { !$_->pid } @redis;
	return 0 if $setup =~ /single|local/;
	if ($setup eq 'sentinel')
	{
		my ($master) = @masters;

		# While a fail-over is under way, the Sentinels have other flags, and would not expect these commands.
		await('the Sentinels to agree', sub {
			my %named = map { my %of = @{ $_->cli('SENTINEL', 'MASTER', 'service') }; ("$of{port} $of{flags}" => 1) } @sentinels;

			($master) = grep { $named{ $_->port . ' master' } } @redis;
			return 0 if keys %named > 1 || !$master || role($master) ne 'master';
			foreach my $other (grep { role($_) eq 'master' && $_ != $master } @redis) { $other->cli('REPLICAOF', '127.0.0.1', $master->port) }
			return !grep { $_ != $master && !$_->follows } @redis;
		});
		my $moved = $master != $masters[0];
		@masters = $master;
		return $moved;
	}
	my $moved = 0;
	# A replica can take over also while the others are awaited.
	await('masters with their replicas', sub {
		foreach my $i (0 .. 2)
		{
			my ($master, $replica) = ($cluster->master($i), $cluster->replica($i));

			return 0 if join(' ', sort map { role($_) } $master, $replica) ne 'master slave';
			next if role($master) eq 'master';
			@$cluster{qw(masters replicas)} = ([ map { $_ == $master ? $replica : $_ } $cluster->masters ], [ map { $_ == $replica ? $master : $_ } @{ $cluster->{replicas} } ]);
			$moved = 1;
		}
		return !grep { !$_->follows } @{ $cluster->{replicas} };
	});
	$cluster->await_agreement(6);
	@masters = $cluster->masters;
	return $moved;
}

my $library = preload("$FindBin::RealBin/../clocks.c") // die 'there is no C compiler';
set_clock("wall$_", 0) foreach 0 .. $servers - 1;

# Starts or restarts a server, whose clock can be set.
sub start_with_clock
{
	my ($node, $n, $how) = @_;

	# pg_ctl compares the time at which the server starts with its own clock.
	set_clock("wall$n", 0);
	return with_clocks($library, sub { return $how->($node) }, CLOCK => "wall$n");
}

sub start_nodes
{
	my ($url) = @_;
	my @store = $setup eq 'local'
	  ? ('shared_preload_libraries = ratelimit', 'ratelimit.store = local', 'ratelimit.local_persistence = on', 'ratelimit.local_max_keys = 20000')
	  : "ratelimit.redis_url = '$url'";
	my $node = shared_node($redis[0] || RedisServer->new, @store, 'restart_after_crash = on', "log_line_prefix = '%e '", 'max_connections = 40',
		'shared_buffers = 16MB', 'fsync = off', 'ratelimit.command_timeout = 2s', 'ratelimit.connect_timeout = 2s', 'ratelimit.retry_interval = 300ms');

	create_act($node);
	$node->safe_psql('postgres', q{
		CREATE FUNCTION limits_of(text) RETURNS rl_limits LANGUAGE sql RETURN $1::rl_limits;
		CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
		CREATE TABLE row_acts (k text, l text, q int);
		CREATE TRIGGER a BEFORE INSERT ON row_acts FOR EACH ROW EXECUTE FUNCTION rl_enforce('{k}', 'public.limits_of({l})', 'quota={q}');
		CREATE TABLE two_acts (k text, k2 text, l text, q int);
		CREATE TRIGGER a BEFORE INSERT ON two_acts FOR EACH ROW
			EXECUTE FUNCTION rl_enforce('{k}', 'public.limits_of({l})', '{k2}', 'public.limits_of({l})', 'quota={q}');
		CREATE TRIGGER b BEFORE INSERT ON row_acts FOR EACH ROW EXECUTE FUNCTION nothing();
		CREATE TRIGGER b BEFORE INSERT ON two_acts FOR EACH ROW EXECUTE FUNCTION nothing();
		CREATE UNLOGGED TABLE statement_acts (k text, l text);
		CREATE TRIGGER a AFTER INSERT ON statement_acts REFERENCING NEW TABLE AS new
			FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('{k}', 'public.limits_of({l})')});
	if ($wrong)
	{
		my $built = wrong_library(@{ $wrong{$wrong} // die "no wrong build is called $wrong" });

		$node->safe_psql('postgres', "UPDATE pg_proc SET probin = '$built' WHERE probin = 'ratelimit' OR probin = '\$libdir/ratelimit'");
		$node->append_conf('postgresql.conf', "shared_preload_libraries = '$built'");
	}
	my @nodes = with_copies($node, $servers - 1);
	start_with_clock($nodes[$_], $_, sub { start_node($_[0], 'restart') }) foreach 0 .. $#nodes;
	return @nodes;
}

#
# Faults
#

my @nodes = start_nodes(start_redis());
my $dir = PostgreSQL::Test::Utils::tempdir;
my @clients = SoakClients->start_all($dir, 0, CLIENTS - 1, \@nodes, seed => $seed, plan_seed => $seed, dir => $dir, clients => CLIENTS);
my ($killed, @calm) = (0);

sub signal { my ($signal, $n) = @_; return kill $signal, backends($n, \@clients, @nodes); }

# New connections fail, and those that are there work.
sub refuse
{
	my ($since) = @_;

	# Until then all sessions have asked Redis again.
	sleep 0.5;
	# In a pause, ends of transactions give up and reset their connections, without an error.
	my $paused = chance(50);
	if ($paused) { $redis[0]->pause; sleep 0.15 }
	$proxy->tell('refuse');
	$redis[0]->resume if $paused;
	my $from = time * 1e6;
	$_->psql('postgres', q{SELECT rl_allow('new', '1/1s')}) foreach @nodes;
	sleep 0.3 + rand 0.3;
	push @calm, [ $since * 1e6, $from, time * 1e6 ];
	$proxy->tell('accept');
	return;
}

# PostgreSQL 15, also without this extension, never ends if a fast shutdown comes while it recovers from the
# kill of a session: its postmaster waits for the checkpointer, and does not tell it to end.
sub restart
{
	my ($node) = @_;

	await('the end of a recovery', sub { return $node->psql('postgres', 'SELECT 1') == 0 });
	start_node($node, 'restart');
	return;
}

my ($since, @losses);

# Waits until Redis is as it should be, and notes when it may have lost what it had answered.  That can be as early as the
# last such wait, because Redis can look well while a replica is about to replace a master.
sub note_losses
{
	my $now = time;

	push @losses, [ $since * 1e6, time * 1e6 + 1e6 ] if settle_redis();
	$since = $now;
	return;
}

sub move_slots
{
	my (undef, @keys) = @_;

	# On a busy machine a replica would take over unasked, and the move would never end.
	$_->cli('CONFIG', 'SET', 'cluster-replica-no-failover', 'yes') foreach @redis;
	note_losses();
	foreach my $slot (map { $cluster->slot(pick(@keys)->{name}) } 1 .. 3)
	{
		my ($from) = grep { $cluster->_owner($masters[0], $slot) == $masters[$_]->port } 0 .. 2 or next;
		my $to = ($from + 1 + below(2)) % 3;

		$cluster->begin_move($slot, $from, $to);
		sleep rand 0.2;
		$cluster->end_move($slot, $from, $to);
	}
	$_->cli('CONFIG', 'SET', 'cluster-replica-no-failover', 'no') foreach @redis;
	return;
}

my $with_redis = qr/single|cluster|sentinel/;
# Each has: how often, in which set-ups, whether units of leases may be lost, and what it does.  It gets when the
# fault before it ended, and the keys.
my %faults = (
	'Redis killed' => [ 2, $with_redis, 1, sub { pick(@masters)->restart } ],
	'Redis stopped' => [ 2, $with_redis, 1, sub { my $redis = pick(@masters); $redis->pause; sleep rand(chance(80) ? 0.5 : 2.5); $redis->resume } ],
	'Redis paused' => [ 2, $with_redis, 0, sub { foreach (1 .. 5) { $_->cli('CLIENT', 'PAUSE', 10 + below(20)) foreach @masters; sleep 0.05 } } ],
	'Redis full' => [ 2, $with_redis, 1, sub { my $redis = pick(@masters); $redis->cli('CONFIG', 'SET', 'maxmemory', 1); sleep rand 0.3; $redis->cli('CONFIG', 'SET', 'maxmemory', 0) } ],
	'clients of Redis killed' => [ 1, $with_redis, 1, sub { pick(@masters)->cli('CLIENT', 'KILL', 'TYPE', 'normal') } ],
	'master lost' => [ 2, qr/sentinel|cluster/, 1, sub { pick(@masters)->stop; await('a new master', sub { (grep { role($_) eq 'master' } @redis) >= ($setup eq 'cluster' ? 3 : 1) }) } ],
	'master handed over' => [ 2, qr/cluster/, 1, sub { $cluster->fail_over(below(3)) } ],
	'slot moved' => [ 8, qr/cluster/, 1, \&move_slots ],
	'requests lost' => [ 3, qr/single/, 1, sub { $proxy->tell('reset') } ],
	'replies lost' => [ 6, qr/single/, 1, sub { $proxy->tell('lose') } ],
	'connections silent' => [ 1, qr/single/, 1, sub { $proxy->tell('drop') } ],
	'network slow' => [ 2, qr/single/, 1, sub { $proxy->tell('slow'); sleep rand 0.5; $proxy->tell('fast') } ],
	'new connections refused' => [ 3, qr/single/, 1, \&refuse ],
	'calls cancelled' => [ 6, qr/./, 0, sub { signal(INT => 4) } ],
	'sessions ended' => [ 3, qr/./, 0, sub { signal(TERM => 3) } ],
	'sessions stopped' => [ 4, qr/./, 0, sub { my @pids = backends(3, \@clients, @nodes); kill 'STOP', @pids; sleep 0.05 + rand 0.2; kill 'CONT', @pids } ],
	'session killed' => [ $setup eq 'local' ? 3 : 1, qr/./, 1, sub { $killed += signal(KILL => 1) } ],
	'server killed' => [ 1, qr/./, 1, sub { my $n = below($servers); start_with_clock($nodes[$n], $n, \&kill_server) } ],
	'postmaster killed' => [ 1, qr/local/, 1, sub { start_with_clock($nodes[0], 0, sub { kill_server($_[0], sub { }) }) } ],
	'server stopped at once' => [ 1, qr/local/, 1, sub { start_with_clock($nodes[0], 0, sub { $_[0]->stop('immediate'); start_node($_[0]) }) } ],
	'server restarted' => [ 1, qr/./, 1, sub { my $n = below($servers); start_with_clock($nodes[$n], $n, \&restart) } ],
	'clock set' => [ 3, $with_redis, 0, sub { set_clock('wall' . below($servers), pick(-1, 1) * int(10**(3 + rand 7))) } ]);
my %did = map { ($_ => 0) } grep { $setup =~ $faults{$_}[1] } keys %faults;

# Disturbs a round until its end.  Returns whether units of leases may be lost.
sub disturb
{
	my ($end, $clocks, @keys) = @_;
	my ($lease, $last) = (0, time);
	# Some rounds have only faults that lose no lease.
	my $mild = chance(25);
	my @names = map { ($_) x $faults{$_}[0] } grep { !($mild && $faults{$_}[2]) && ($_ ne 'clock set' || $clocks) } sort keys %did;

	while (time < $end)
	{
		my $name = pick(@names);

		sleep rand 0.3;
		$faults{$name}[3]->($last, @keys);
		note_losses();
		$did{$name}++;
		$lease ||= $faults{$name}[2];
		$last = time;
	}
	if ($proxy) { $proxy->tell('fast'); $proxy->tell('accept') }
	set_clock("wall$_", 0) foreach 0 .. $servers - 1;
	return $lease;
}

#
# Processes at rest
#

my (%seen, %leak);

# Returns how many sockets and pipes a process has, and its own memory in kB.
sub has
{
	my ($pid) = @_;
	my $n = grep { (readlink($_) // '') =~ /^(?:socket|pipe|anon_inode)/ } glob "/proc/$pid/fd/*";

	return ($n, (-r "/proc/$pid/status" ? slurp_file("/proc/$pid/status") : '') =~ /^RssAnon:\s+(\d+)/m ? $1 : 0);
}

# Notes how processes have grown since their second look.
sub look_at_processes
{
	foreach ((map { [ session => $_ ] } backends(CLIENTS, \@clients, @nodes)), map { [ Redis => $_->pid ] } @redis)
	{
		my ($what, $pid) = @$_;
		my $of = $seen{"$what $pid"} ||= [];

		push @$of, [ has($pid) ];
		my $first = $of->[ @$of > 2 ? 2 : -1 ];
		my @grown = map { $of->[-1][$_] - $first->[$_] } 0, 1;
		my $leak = $leak{$what} ||= { sockets => 0, kB => 0, rounds => 0, n => 0 };
		$leak->{n}++ if @$of == 1;
		$leak->{sockets} = max($leak->{sockets}, $grown[0]);
		$leak->{kB} = max($leak->{kB}, $grown[1]);
		$leak->{rounds} = max($leak->{rounds}, scalar @$of);
	}
	return;
}

#
# Rounds
#

my (%checked, %skipped, %problems, %calls);
my ($rounds, $events, $lost, $begin) = (0, 0, 0);

# Adds a problem, and shows its history if it is the first of its check.
sub problem
{
	my ($check, $text, @history) = @_;
	my $start = @history ? $history[0]{from} : 0;

	push @{ $problems{$check} }, $text;
	return if @{ $problems{$check} } > 3;
	diag sprintf '%s, after %.0f s: %s', $check, time - $begin, $text;
	my @lines = map { event_text($_, $start) } @history;
	splice @lines, 40, @lines - 60, '...' if @lines > 70;
	diag map { "    $_\n" } @lines;
	return;
}

# Returns how many units of each limit of the keys are used, by the number of the key.
sub used
{
	my (@keys) = @_;
	my $values = join ', ', map { "($_->{number}, '$_->{name}', '$_->{text}')" } grep { $_->{kind} ne 'lease' } @keys;
	my ($rows, %used);

	await('the keys', sub {
		return 0 if $nodes[0]->psql('postgres', "SELECT n, capacity - remaining, source FROM (VALUES $values) v (n, k, l), rl_peek(k, l::rl_limits, 0) WITH ORDINALITY p (rule, allowed, capacity, remaining, retry, reset, source, o) ORDER BY n, o", stdout => \$rows) != 0;
		# A banned key has nothing left.
		return $rows !~ /\|ban$/m;
	});
	foreach (split /\n/, $rows)
	{
		my ($n, $units) = split /\|/;
		push @{ $used{$n} }, $units;
	}
	return %used;
}

sub play
{
	my ($round) = @_;
	my $plan = plan_of($seed, $round, SECONDS, $servers, CLIENTS);
	my @keys = @{ $plan->{keys} };
	my $clocks = $round % 3 == 0 && $setup ne 'local' ? 1 : 0;

	srand $seed + 104_729 * $round;
	my $start = begin_round($dir, $round, SECONDS, $clocks);
	($since, @losses) = (time);
	my $lease = disturb($start + SECONDS, $clocks, @keys);
	my @lines = end_round($round, @clients);
	note_losses();
	# What clients have sent has reached Redis, and has run.
	foreach (1, 2) { $proxy->tell('accept') if $proxy; $_->cli('PING') foreach @masters }
	my %used = used(@keys);
	my $borders = int($start / 1800) != int(time / 1800);
	my ($of, @errors) = read_events(@lines);

	$events += map { @$_ } values %$of;
	$lost += @losses;
	foreach my $key (@keys)
	{
		my @of = @{ $of->{ $key->{number} } || [] };

		$key->{used} = $used{ $key->{number} };
		$calls{"$_->{what} " . ($_->{answer} // '')}++ foreach @of;
		foreach (check_key($key, \@of, \@losses, crashes => $lease, borders => $borders))
		{
			my ($name, $n, @wrong) = @$_;

			defined $n ? ($checked{$name} += $n) : $skipped{$name}++;
			problem($name, "round $round, $key->{name}, $key->{text}: $_->{text}", @{ $_->{events} }) foreach @wrong;
		}
	}
	my ($unknown, $cut) = error_problems(\@errors, @calm);
	$calls{"error $_"}++ foreach map { substr $_->{text}, 0, 5 } @errors;
	$checked{'only errors that a fault explains'} += @errors;
	$checked{'no session is cut off from a Redis that answers'} += @calm;
	problem('only errors that a fault explains', "round $round: $_->{text}", $_) foreach @$unknown;
	problem('no session is cut off from a Redis that answers', "round $round: $_->{text}", $_) foreach @$cut;
	@calm = ();
	$nodes[0]->psql('postgres', 'SELECT count(rl_reset(k)) FROM unnest(ARRAY[' . join(',', map { "'$_->{name}'" } @keys) . ']) k');
	look_at_processes();
	return;
}

$begin = time;
await('the clients', sub { return !grep { !-s "$_->{file}.pid" } @clients });
do { play(++$rounds) } until time > $begin + 60 * $minutes || $wrong && grep { /$finds/ } keys %problems;

#
# The end
#

foreach (@clients) { kill 'KILL', $_->{pid}; waitpid $_->{pid}, 0 }
my $logs = join '', map { new_log($_) } @nodes;
my $crashes = count_of(qr/was terminated by signal 9/, $logs);
problem('no process has crashed', "$_") foreach $logs =~ /^(.*(?:PANIC|TRAP:|was terminated by signal (?!9\b)|XX000 (?!LOG:)).*)$/mg;
problem('no process has crashed', "$crashes processes were killed, not $killed") if $crashes > $killed;
foreach my $what (sort keys %leak)
{
	my $of = $leak{$what};

	$checked{'no descriptor and no memory is leaked'} += $of->{n};
	problem('no descriptor and no memory is leaked', "a $what has $of->{sockets} sockets more, and $of->{kB} kB") if $of->{sockets} > ($what eq 'Redis' ? CLIENTS : 2) + 2 * @redis || $of->{kB} > ($what eq 'Redis' ? 65_536 : 8192);
	note sprintf '%s: %d processes, at most %d sockets and %d kB more, within %d rounds', $what, @$of{qw(n sockets kB rounds)};
}
$checked{'no process has crashed'} = $servers;
note sprintf "measured: %s, seed %d, %d servers, %d clients: %.1f minutes, %d rounds, %d events", $setup, $seed, $servers, CLIENTS, (time - $begin) / 60, $rounds, $events;
note "A replica took over $lost times." if $setup =~ /cluster|sentinel/;
my $format = '%-50s %9s %9s %9s';
note sprintf $format, 'check', 'checked', 'keys not', 'wrong';
note sprintf $format, $_, $checked{$_} // 0, $skipped{$_} // 0, scalar @{ $problems{$_} || [] } foreach sort keys %{ { %checked, %skipped, %problems } };
note sprintf '%-50s %9d', $_, $did{$_} foreach sort keys %did;
note join ', ', map { "$_: $calls{$_}" } sort keys %calls;
cmp_ok($events, '>', 0, 'the clients have written what they got');
if ($wrong)
{
	my @found = grep { /$finds/ } sort keys %problems;

	ok(@found, sprintf '%s: %s after %.0f s', $wrong, @found ? "found by '$found[0]'" : 'not found', time - $begin);
}
else
{
	is(scalar @{ $problems{$_} || [] }, 0, $_) foreach sort keys %{ { %checked, %skipped, %problems } };
}
done_testing();
