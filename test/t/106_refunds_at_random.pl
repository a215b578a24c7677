# Refunds while everything ends at random: no unit of "concurrent" is held by a transaction that has ended,
# and counters under refund_on_abort have what was committed.
#
# RATELIMIT_PROGRAMS is how many random programs run, RATELIMIT_SESSIONS with how many sessions each, each of which
# runs a transaction of its own; RATELIMIT_AWAY for how many seconds Redis fails, RATELIMIT_FAILURES a pattern of what
# it does (OverdueRefunds.pm); RATELIMIT_STATEMENTS how many statements run under statement_timeout.  RATELIMIT_SEED
# repeats the programs.
#
# Runs once in a suite: transactions end in PostgreSQL.
use OverdueRefunds qw(watch_refunds take status redis_failures);
use RatelimitTest;
use Engines;
use Time::HiRes qw(time);

seed();
my $nsessions = $ENV{RATELIMIT_SESSIONS} || 16;
# What a process has written survives its kill, also without fsync.
my $redis = RedisServer->new(args => [ '--appendonly', 'yes', '--appendfsync', 'no' ])->start;
my $node = shared_node($redis, 'ratelimit.command_timeout = 20s', 'ratelimit.retry_interval = 100ms',
	'max_connections = 100', 'max_prepared_transactions = 100');
my $watcher = session($node);
watch_refunds($redis, $watcher);

# Returns the keys whose units are held, as Redis says.
sub held
{
	my ($pattern) = @_;

	return @{ $redis->cli('EVAL', q{
		local held = {}
		for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
			local units = redis.call('HGET', key, 'concurrent:3600000000')
			if units and string.sub(units, 1, 1) ~= '0' then held[#held + 1] = key end
		end
		return held}, 0, $pattern) };
}

#
# Sessions end their transactions while Redis fails
#

my %failures = redis_failures();
{
	my $programs = steps(10, 'RATELIMIT_PROGRAMS');
	my @names = grep { /${\($ENV{RATELIMIT_FAILURES} || '.')}/ } sort keys %failures;
	my $away = $ENV{RATELIMIT_AWAY} || 0;
	my @sessions = map { session($node) } 1 .. $nsessions;
	my ($longest, @wrong) = (0);

	foreach my $program (1 .. $programs)
	{
		my $name = pick(@names);
		my ($fails, $is_well) = @{ $failures{$name} };
		my @pids = map { $_->pid } @sessions;
		my @ends = map { pick(qw(commit rollback cancel terminate prepare)) } @sessions;
		my %killed;

		foreach my $n (0 .. $#sessions)
		{
			my $more = chance(30) ? 'SAVEPOINT s; ' . take("program:$program:$n:s", 3) . (chance(50) ? '; ROLLBACK TO s' : '; RELEASE s') : 'SELECT 1';

			$sessions[$n]->send('BEGIN; ' . take("program:$program:$n", 1 + below(3)) . "; $more;");
		}
		$_->ask('') foreach @sessions;
		$fails->();
		my $failed = time;
		foreach my $n (0 .. $#sessions)
		{
			my $end = $ends[$n];

			if ($end eq 'prepare') { $sessions[$n]->send("PREPARE TRANSACTION 'p$n';"); }
			elsif ($end =~ /commit|rollback/) { $sessions[$n]->send("$end;"); }
			else
			{
				$sessions[$n]->send(take("program:$program:$n:more") . ';') if chance(70);
				$watcher->ask("SELECT pg_${end}_backend($pids[$n])");
				$killed{$n} = 1 if $end eq 'terminate';
			}
		}
		my $until = $away ? $failed + $away : $name =~ /suspended/ && chance(50) ? time + rand 0.3 : 0;
		# The server is well in the middle of the ends, or long after them.
		my $well;
		my @then = (sub {
			await('the end of the failure', sub { return time > $until });
			$is_well->();
			$well = time;
		}, sub {
			$watcher->await_end($pids[$_]) foreach sort keys %killed;
			$sessions[$_]->ask('ROLLBACK') foreach grep { !$killed{$_} } 0 .. $#sessions;
		});
		$_->() foreach $away ? reverse @then : @then;
		my @held;
		eval { await('the units', sub { return !(@held = held("rl:{program:$program:*")) }) };
		push @wrong, "program $program, $name, @ends: @held" if @held;
		$longest = max($longest, time - $well);
		foreach my $n (sort keys %killed)
		{
			eval { $sessions[$n]->quit };
			$sessions[$n] = session($node);
		}
		$watcher->ask("ROLLBACK PREPARED '$_'") foreach split /\n/, $watcher->ask('SELECT gid FROM pg_prepared_xacts');
	}
	none(\@wrong, "no unit is held after $programs random programs of $nsessions sessions");
	note $ENV{RATELIMIT_PROGRAMS} ? 'measured: ' : '', "$programs random programs of $nsessions sessions (@names), for $away s each: no unit is held ",
	  "$longest s after Redis was well at the latest";
	$_->quit foreach @sessions;
	is(sum0(new_log($node) =~ /could not refund (\d+)/g), 0, 'no refund was lost');
	is(status('refunds_lost'), 0, 'and none is counted');
}

#
# Statements are cancelled by statement_timeout at every moment
#

{
	my $total = steps(2400, 'RATELIMIT_STATEMENTS');
	my $limit = 'fixed_window 1000000/10d from_first';
	my ($cancelled, @runs) = (0);

	$watcher->ask(qq{
		RESET ratelimit.store;
		CREATE TABLE by_row (id bigserial, who int);
		CREATE TABLE by_statement (id bigserial, who int);
		CREATE TRIGGER t AFTER INSERT ON by_row FOR EACH ROW EXECUTE FUNCTION rl_enforce('row:{who}', '$limit refund_on_abort');
		CREATE TRIGGER t AFTER INSERT ON by_statement REFERENCING NEW TABLE AS added FOR EACH STATEMENT
			EXECUTE FUNCTION rl_enforce('statement:{who}', '$limit refund_on_abort')});
	foreach my $client (1 .. 4)
	{
		my $file = PostgreSQL::Test::Utils::tempdir . "/$client.sql";
		my %run = (err => '');

		append_to_file($file, join "\n", map {
			my $rows = 1 + below(20);

			'SET statement_timeout = ' . (1 + below(3)) . ';',
			  $_ % 3 == 0 ? "SELECT rl_allow('cancelled:' || n % 7, 'concurrent 1000/1h') FROM generate_series(1, $rows) n;" :
			  'INSERT INTO by_' . ($_ % 3 == 1 ? 'row' : 'statement') . " (who) SELECT (@{[ below(5) ]} + n) % 5 FROM generate_series(1, $rows) n;"
		} 1 .. $total / 4);
		$run{handle} = IPC::Run::start([ $node->installed_command('psql'), '-XAtq', '-d', $node->connstr('postgres'), '-f', $file ],
			'>', '/dev/null', '2>', \$run{err});
		push @runs, \%run;
	}
	foreach (@runs) { $_->{handle}->finish; $cancelled += count_of(qr/statement timeout/, $_->{err}); }
	settled($watcher);
	cmp_ok($cancelled, '>', 0, "statements are cancelled: $cancelled of $total");
	is_deeply([ held('rl:{cancelled:*') ], [], 'they hold no unit');
	# How many more each counter has than rows are committed.
	my %more = map {
		my $name = $_;

		($name => [ split /\n/, $watcher->ask("SELECT 1000000 - remaining - (SELECT count(*) FROM by_$name t WHERE t.who = g.who)
			FROM generate_series(0, 4) g (who), rl_peek('$name:' || who, '$limit', 0)") ])
	} qw(row statement);
	my $log = new_log($node);
	my $lost = status('refunds_lost');

	note "refunds: ", status('refunds_sent_late'), " late, $lost lost ", $log =~ /(could not refund.*\n.*DETAIL.*)/g;
	is(sum0($log =~ /could not refund (?:the charges of up to )?(\d+)/g), $lost, 'the log shows what is lost');
	foreach my $name (sort keys %more)
	{
		cmp_ok(min(@{ $more{$name} }), '>=', 0, "triggers FOR EACH \U$name\E: the counters have the rows committed");
		# A statement has up to four rows of a key, whose charges are one refund.
		cmp_ok(sum0(@{ $more{$name} }), '<=', 4 * $lost, 'and nothing else, but for what is lost');
	}
}
done_testing();
