# The queue of docs/queues.md: what each fetch charges, whatever has happened to the fetch
# before it; then 8 workers on 100 tenants (20 in the everyday form), which are killed while they work.  No tenant exceeds
# a limit, no fetch passes a tenant that is free, and no job is lost or run twice.
#
# All that the checks know is what the workers have written: when they sent a command, and when
# they had its answer.  RATELIMIT_QUEUE_SECONDS is the length of the load.
#
# Runs once in a suite: it depends on how PostgreSQL plans, and not on Redis.
use RatelimitTest;
use DocPage;
use Holder;
use Time::HiRes qw(sleep time);

my $WORKERS = 8;
my $TENANTS = is_long() ? 100 : 20;
my ($STARTS, $WINDOW, $UNITS) = (10, 1, 3);
# In place of the page's minute.
my $PERIOD = 3;
my $SECONDS = steps(10, 'RATELIMIT_QUEUE_SECONDS', 5);

my ($redis, $node, $session) = start_servers(\&shared_node, 'restart_after_crash = on', 'fsync = off', 'max_connections = 40');
my $page = DocPage->new("$FindBin::RealBin/../../docs/queues.md");

foreach my $text (map { $_->{text} } $page->commands)
{
	$text =~ s/\b1 ?min\b/${PERIOD}s/g;
	$session->ends($text =~ s/^(?:INSERT|SELECT) .*\n//mgr, 'the page makes its objects');
}
like($session->ask(q{SELECT prosrc FROM pg_proc WHERE proname = 'next_job'}), qr{concurrent $UNITS/${PERIOD}s, sliding_log $STARTS/${WINDOW}s}, 'the limits are those of this test');

#
# The trigger
#

$session->ends(q{INSERT INTO jobs (payload) SELECT jsonb_build_object('tenant', t) FROM unnest('{a,b}'::text[]) t, generate_series(1, 500)}, 'adds jobs');
$session->ends(q{INSERT INTO jobs (payload) SELECT jsonb_build_object('tenant', t) FROM unnest('{a,b}'::text[]) t, generate_series(1, 501)}, 'adds too many', 'PT429');
like($session->error, qr/Key "add:a" has \d+ of 1000 left/, 'of a tenant');
$session->ends(q{INSERT INTO jobs (payload) VALUES ('{}')}, 'adds one without a tenant', '23502');
$session->ask('DROP TRIGGER limit_jobs ON jobs');

#
# One fetch after another
#

sub start_again
{
	my (%jobs) = @_;

	$redis->cli('FLUSHALL');
	$session->ask('TRUNCATE jobs RESTART IDENTITY');
	$session->ask("INSERT INTO jobs (payload) SELECT '{\"tenant\": \"$_\"}' FROM generate_series(1, $jobs{$_})") foreach sort keys %jobs;
	return;
}

# Returns the units of a tenant that the limits count: of concurrent, and of the log.
sub used
{
	my ($tenant) = @_;

	return $session->ask(qq{SELECT coalesce(sum(used) FILTER (WHERE state LIKE 'concurrent%'), 0) || ' ' || coalesce(sum(used) FILTER (WHERE state LIKE 'sliding_log%'), 0)
		FROM rl_inspect('job:$tenant')});
}

sub next_job { my ($after, $by) = @_; return ($by || $session)->ask("SELECT place, id, attempt FROM next_job('$after')"); }

my $other = session($node);
start_again(a => 5, b => 1, c => 1);
is(next_job(''), 'a|1|1', 'the first job');
is(used('a'), '1 1', 'is charged');
is(next_job('a'), 'b|6|1', 'the next tenant is next');
is(next_job('b'), 'c|7|1', 'and the one after it');
is(next_job('c'), '||', 'then the end is reached');
is(next_job(''), 'a|2|1', 'and it begins again');
is(next_job('') . ' ' . next_job(''), 'a|3|1 ||', 'a tenant has three units, and the jobs of the others run');
is(used('a'), '3 3', 'a refused job is not charged');
is(used('b') . ', ' . used('c'), '1 1, 1 1', 'nor is one that is not there');

sub next_turn { my ($by) = @_; return ($by || $session)->ask('SELECT after, place, id FROM next_turn()'); }

start_again(a => 2, b => 2);
$session->ask("UPDATE turn SET place = ''");
is(join(' ', map { next_turn($_) } $session, $other, $session, $other), '|a|1 a|b|3 b|| |a|2', 'sessions share the place');
$other->ask('BEGIN');
is(next_turn($other), 'a|b|4', 'a fetch that is not committed');
my ($watcher, $pid) = (session($node), $session->pid);
$session->send("SELECT after, place, id FROM next_turn()\n;");
$watcher->await_waiting($pid, 'Lock');
$other->ask('ROLLBACK');
is($session->ask(''), 'a|b|4', 'the next one waits for its end');

# A worker that dies before the commit of its fetch leaves the same as a rollback.
start_again(a => 2, b => 1);
$other->ask('BEGIN');
is(next_job('', $other), 'a|1|1', 'a fetch that is not committed');
is(next_job(''), 'a|2|1', 'another job of the tenant can be taken');
$other->ask('ROLLBACK');
is(used('a'), '2 2', 'both are charged');
is(next_job(''), 'a|1|1', 'after its rollback the same attempt is taken');
is(used('a'), '2 2', 'and not charged again');
$other->ask('SELECT end_job(1, 1), end_job(2, 1)');
is(used('a'), '0 2', 'the ends free the units, and not the starts');

# The rest of the period of the first try is not that of the second.
start_again(a => 1);
$other->ask("BEGIN; SELECT FROM next_job(''); ROLLBACK");
my $end = $session->ask(q{SELECT until FROM rl_inspect('job:a') WHERE raw = 'open'});
is(next_job(''), 'a|1|1', 'an attempt that is taken again');
is($session->ask(qq{SELECT string_agg((until > '$end')::text, ' ') FROM rl_inspect('job:a') WHERE raw = 'open' OR state LIKE 'concurrent%'}), 'true true', 'has a whole period');

# A job that is put back has another attempt, which is charged.
start_again(a => 1);
is(next_job(''), 'a|1|1', 'a job');
is($session->ask("SELECT extend_job(1, 1, '1 ms')"), 't', 'is put back');
is(await('a job that is put back', sub { next_job('') =~ s/^\|\|$//r }), 'a|1|2', 'its second attempt');
is(used('a'), '1 2', 'is charged again');
is($session->ask("SELECT end_job(1, 1), extend_job(1, 1)"), 'f|f', 'the first attempt can no longer end or extend it');
is($session->ask('SELECT extend_job(1, 2), end_job(1, 2), end_job(1, 2)'), 't|t|f', 'the second one can, once');

# The period ends the job of a worker that has died.
start_again(a => 4);
next_job('') foreach 1 .. 3;
is(next_job(''), '||', 'three jobs run');
is(await('the end of the period', sub { next_job('') =~ s/^\|\|$//r }), 'a|4|1', 'after their period the fourth may');
is(await('an abandoned job', sub { next_job('') =~ s/^\|\|$//r }), 'a|1|2', 'and the first one again');

# All jobs of a tenant are locked.
start_again(a => 3, b => 1);
$other->ask(q{BEGIN; SELECT FROM jobs WHERE tenant = 'a' FOR UPDATE});
is(next_job(''), 'b|4|1', 'a tenant whose jobs are all locked is passed');
is(used('a'), '0 0', 'and not charged');
$other->ask('ROLLBACK');

# Redis fails.
start_again(a => 3);
next_job('') foreach 1 .. 2;
my $down = "SET ratelimit.redis_url = 'redis://127.0.0.1:1'";
is($session->ask("$down; SELECT FROM next_job('')"), '', 'without Redis, a fetch fails');
like($session->error, qr/PT504/, 'as every call');
is($session->ask('SELECT extend_job(1, 1), end_job(1, 1)'), 't|t', 'a job is extended and ended nevertheless');
is($session->ask("SET ratelimit.on_error = 'deny'; SELECT id FROM next_job('')"), '', 'deny: no job');
is($session->ask("SET ratelimit.on_error = 'allow'; SELECT id FROM next_job('')"), '3', 'allow: a job without limits');
is($session->ask('SELECT end_job(3, 1)'), 't', 'which can be ended');
$session->ask('RESET ratelimit.on_error; RESET ratelimit.redis_url');

#
# Plans: those made for an empty table, and for one without statistics
#

$session->ask('ALTER TABLE jobs SET (autovacuum_enabled = off)');
start_again(a => 1);
$session->ask('ANALYZE jobs');
foreach (1 .. 10) { $session->ask("SELECT FROM next_job(''); UPDATE jobs SET run_at = now()"); $redis->cli('FLUSHALL') }
$session->ask(q{INSERT INTO jobs (payload) SELECT jsonb_build_object('tenant', 'a') FROM generate_series(1, 20000)});
$session->ask(q{INSERT INTO jobs (payload) SELECT jsonb_build_object('tenant', 'b' || n) FROM generate_series(1, 98) n});
foreach my $how ('the plan for an empty table', 'a plan without statistics', 'a plan with statistics')
{
	$session->ask('DISCARD PLANS') if $how =~ /without/;
	$session->ask('VACUUM ANALYZE jobs; DISCARD PLANS') if $how =~ /with s/;
	$redis->cli('FLUSHALL');
	$session->ask("SELECT rl_ban('job:a', 600)");
	$session->ask("SELECT rl_ban('job:b' || n, 600) FROM generate_series(1, 98) n");
	# What is counted for a transaction includes what is not reported yet of the ones before.
	$session->ask('SELECT pg_stat_force_next_flush()');
	$session->ask('BEGIN');
	is(next_job(''), '||', "$how: no tenant is free");
	my ($scans, $read) = split /\|/, $session->ask(q{
		SELECT seq_scan, (SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid)) FROM pg_index WHERE indrelid = relid)
		FROM pg_stat_xact_user_tables WHERE relname = 'jobs'});
	$session->ask('ROLLBACK');
	is($scans, 0, "$how: the fetch does not read the table");
	cmp_ok($read, '<', 10 * 99, "$how: and few entries of the index");
}

#
# The load
#

package Worker;

use PsqlClient;
use Time::HiRes qw(sleep time);

our @ISA = ('PsqlClient');

sub heard
{
	my ($self, $line) = @_;

	$self->{error} ||= $line if $line =~ /ERROR:/;
	return $line !~ /ERROR|FATAL|WARNING|DETAIL|HINT|connection|server/;
}

# Writes what is known of a command: its times, its answer, or that there was none.
sub note
{
	my ($self, @fields) = @_;

	syswrite $self->{out}, join(' ', map { $_ eq '' ? '-' : $_ } @fields) . "\n";
	return;
}

sub call
{
	my ($self, $what, $name, $arguments, @more) = @_;

	$self->{error} = '';
	$self->note('ask', $what, time, @more);
	my $answer = $self->ask("SELECT * FROM $name($arguments)");
	$self->note($what, $self->{sent}, time, @more, defined $answer ? $name eq 'next_turn' ? (split /\|/, $answer, 5)[ 0 .. 3 ] : $answer : 'lost')
	  if $self->{sent};
	$self->note('error', $self->{error}) if $self->{error};
	return $answer;
}

# Does a job.  Those of one tenant take longer than its starts.  Some are long, and are extended, but not
# so many that all workers have one.
sub work
{
	my ($self, $tenant, $id, $attempt) = @_;
	my $beats = $id % 2000 == 100 ? 6 : 0;

	sleep($tenant eq 't00' ? 0.3 : rand 0.02);
	foreach (1 .. $beats)
	{
		sleep $self->{period} / 4;
		return if ($self->call('extend', 'extend_job', "$id, $attempt", $id, $attempt) // '') ne 't';
	}
	if (rand() < 0.03) { $self->call('again', 'extend_job', "$id, $attempt, '1 ms'", $id, $attempt) }
	else { $self->call('end', 'end_job', "$id, $attempt", $id, $attempt) }
	return;
}

sub run
{
	my ($self, $parent) = @_;

	srand $self->{seed};
	$self->{dead} = 1;
	until (-e $self->{stop} || getppid != $parent)
	{
		if ($self->{dead})
		{
			$self->start_psql;
			my $pid = $self->ask('SELECT pg_backend_pid()');
			$self->note('backend', $pid) if defined $pid;
			sleep 0.05 unless defined $pid;
			next;
		}
		my (undef, $place, $id, $attempt) = split /\|/, $self->call('next', 'next_turn', '') // next;
		if ($id) { $self->work($place, $id, $attempt) }
		elsif ($place eq '') { sleep 0.1 }
	}
	return;
}

package main;

# The tenants have different numbers of jobs.
start_again();
srand($ENV{RATELIMIT_SEED} || 1);
my %jobs = map { (sprintf('t%02d', $_) => int((20 + rand 40) * max($SECONDS, 5) / 10)) } 0 .. $TENANTS - 1;
my @tenants = sort keys %jobs;
$session->ask("INSERT INTO jobs (payload) SELECT '{\"tenant\": \"$_\"}' FROM generate_series(1, $jobs{$_})") foreach @tenants;
my %tenant = map { split /\|/ } split /\n/, $session->ask('SELECT id, tenant FROM jobs');

# The server will end these sessions.
$_->quit foreach $session, $other, $watcher;
my $dir = PostgreSQL::Test::Utils::tempdir;
my (@workers, @files, %killed, %ended);
sub start_worker
{
	my ($n) = @_;
	my $folder = "$dir/" . @files;

	mkdir $folder;
	($workers[$n]) = Worker->start_all($folder, $n, $n, [$node], seed => 100 * @files, period => $PERIOD, stop => "$dir/stop");
	push @files, $workers[$n]{file};
	return;
}

sub notes { my ($file) = @_; return -e $file ? slurp_file($file) =~ /^(.*)\n/mg : (); }

start_worker($_) foreach 0 .. $WORKERS - 1;
my ($begin, $kills, @down) = (time, 0);
while (time < $begin + $SECONDS || !$killed{backends})
{
	my $n = int rand $WORKERS;
	my $until = time + $SECONDS / 12;

	sleep 0.05 while time < $until;
	if (++$kills % 12 == 5)
	{
		# All servers' processes end with it, and the server starts again.
		my $backend;
		await('a backend', sub { ($backend) = map { /^backend (\d+)/ ? $1 : () } reverse notes($workers[$n]{file}); return $backend && parent_of($backend) });
		my $from = time;
		$killed{backends}++ if kill 'KILL', $backend;
		await('the end of the backend', sub { return !parent_of($backend) });
		await('the server', sub { return $node->psql('postgres', 'SELECT') == 0 });
		push @down, [ $from, time ];
	}
	else
	{
		# In the middle of a job: it has one that has not ended.
		await('a worker with a job', sub { my @notes = notes($workers[$n]{file}); return @notes && $notes[-1] =~ /^next .* \d+ \d+$/ || time > $begin + $SECONDS });
		kill 'KILL', $workers[$n]{pid};
		waitpid $workers[$n]{pid}, 0;
		# Its backend may end the command that it is running.
		my ($backend) = map { /^backend (\d+)/ ? $1 : () } reverse notes($workers[$n]{file});
		await('the end of its session', sub { return !$backend || !parent_of($backend) });
		$ended{ $workers[$n]{file} } = time;
		$killed{workers}++;
		start_worker($n);
	}
}
$session = session($node);
await('the end of all jobs', sub { sleep 0.1; return $session->ask('SELECT count(*) FROM jobs') eq '0' });
append_to_file("$dir/stop", '');
foreach my $worker (@workers)
{
	waitpid $worker->{pid}, 0;
	is($?, 0, 'a worker ends');
}

#
# What the workers have written
#

my (@fetches, @lost, %attempt, @errors);
foreach my $file (@files)
{
	my @notes = notes($file);

	# The worker was killed before it could write the answer.
	push @notes, "$1 $2 " . ($ended{$file} // time) . "$3 lost" if @notes && $notes[-1] =~ /^ask (\w+) (\S+)(.*)$/;
	foreach my $note (@notes)
	{
		my ($what, $sent, $got, @fields) = split / /, $note;

		@fields = map { $_ eq '-' ? '' : $_ } @fields;
		push @errors, $note if $what eq 'error';
		if ($what eq 'next')
		{
			my ($after, $place, $id, $attempt) = @fields;

			if ($after eq 'lost')
			{
				push @lost, [ $sent, $got ];
				next;
			}
			my $fetch = { sent => $sent, got => $got, after => $after, place => $place, id => $id };
			push @fetches, $fetch;
			# Until there is a note of more, the job has been at work for no time, and its unit may be held for the period.
			$attempt{"$id $attempt"} = { id => $id, attempt => $attempt, tenant => $tenant{$id}, sent => $sent, got => $got, known => $sent, until => $got, free => $got + $PERIOD }
			  if $id;
		}
		elsif ($what =~ /^(?:extend|again|end)$/)
		{
			my ($id, $attempt, $answer) = @fields;
			my $job = $attempt{"$id $attempt"};

			$job->{until} = $sent;
			$job->{known} = $sent if $what eq 'extend' && $answer eq 't';
			# If there was no answer, the unit may be held for the period.
			$job->{free} = $what eq 'extend' || $answer eq 'lost' ? $got + $PERIOD : $what eq 'again' ? $got + 0.001 : $got if $answer ne 'f';
			$job->{end} = { answer => $answer, got => $got } if $what eq 'end';
		}
	}
}
cmp_ok(scalar(grep { $_->{known} > $_->{sent} } values %attempt), '>', 0, 'some jobs were extended');
my (%of, %by_id);
push @{ $of{ $_->{tenant} } }, $_ foreach sort { $a->{got} <=> $b->{got} } values %attempt;
push @{ $by_id{ $_->{id} } }, $_ foreach sort { $a->{attempt} <=> $b->{attempt} } values %attempt;

is_deeply(\@errors, [], 'no command has failed, other than by a lost connection');
cmp_ok($killed{$_} // 0, '>', 0, "$_ were killed") foreach qw(workers backends);
note sprintf 'measured: %d jobs, %d attempts of %d tenants in %.1f s, %d workers and %d backends killed, %d fetches without an answer',
  scalar keys %tenant, scalar keys %attempt, scalar keys %of, max(map { $_->{got} } @fetches) - $begin, $killed{workers}, $killed{backends}, scalar @lost;

# Returns how many fetches without an answer can have charged a tenant between these times.
sub lost { my ($from, $to) = @_; return scalar grep { $_->[1] >= $from && $_->[0] <= $to } @lost; }

#
# Limits
#

my (@too_many, @too_fast, $most_held, $most_starts);
foreach my $tenant (@tenants)
{
	my @jobs = sort { $a->{sent} <=> $b->{sent} } @{ $of{$tenant} || [] };
	my $held = most_held($PERIOD, map { [ 1, $_->{known}, $_->{got}, $_->{until} ] } @jobs);

	$most_held = max($most_held // 0, $held);
	push @too_many, "$tenant: $held" if $held > $UNITS;
	foreach my $i (0 .. $#jobs)
	{
		my ($from, $starts) = ($jobs[$i]{sent}, 0);

		foreach my $job (@jobs[ $i .. $#jobs ])
		{
			last if $job->{sent} >= $from + $WINDOW;
			$starts++ if $job->{got} < $from + $WINDOW;
		}
		$most_starts = max($most_starts // 0, $starts);
		# A fetch that was charged but not committed may have charged the job before.
		push @too_fast, "$tenant: $starts from $from" if $starts > $STARTS + lost($from - $PERIOD, $from + $WINDOW);
	}
}
none(\@too_many, "no tenant has more than $UNITS jobs at the same time");
none(\@too_fast, "no tenant starts more than $STARTS jobs in $WINDOW s");
note "measured: at most $most_held jobs of a tenant at a time, $most_starts starts in a second";

#
# Jobs
#

my @wrong;
my $again = 0;
foreach my $id (sort { $a <=> $b } keys %tenant)
{
	my @attempts = @{ $by_id{$id} || [] };
	my @done = grep { $_->{end} && $_->{end}{answer} eq 't' } @attempts;

	push @wrong, "$id is lost" unless @done || grep { $_->{end} && $_->{end}{answer} eq 'lost' } @attempts;
	push @wrong, "$id has ended twice" if @done > 1;
	push @wrong, "$id runs after its end" if @done && grep { $_->{sent} > $done[0]{end}{got} } @attempts;
	foreach my $i (1 .. $#attempts)
	{
		my ($before, $after) = @attempts[ $i - 1, $i ];

		$again++;
		push @wrong, "$id runs twice at a time" if $after->{got} < min($before->{until}, $before->{known} + $PERIOD);
		push @wrong, "$id has the attempt $after->{attempt}" if $after->{attempt} <= $before->{attempt};
	}
}
none(\@wrong, 'no job is lost or run twice');
cmp_ok($again, '>', 0, 'some had another attempt');

#
# Free tenants
#

# The time until which a tenant has more ready jobs than the workers can have locked: until so many have been taken.  Its
# jobs without a first attempt were taken by a fetch without an answer.
my %plenty;
foreach my $tenant (@tenants)
{
	my @first = grep { $_->{attempt} == 1 } @{ $of{$tenant} || [] };
	my $others = grep { $tenant{$_} eq $tenant && !$attempt{"$_ 1"} } keys %tenant;
	my $most = $jobs{$tenant} - $others - $WORKERS;

	$plenty{$tenant} = $most > 0 ? (sort { $a <=> $b } map { $_->{sent} } @first)[ $most - 1 ] : 0;
}

# Returns true if a tenant has a ready job, a free unit and a free start from one time to another.
sub surely_free
{
	my ($tenant, $from, $to) = @_;

	return 0 if $to >= $plenty{$tenant};
	my @jobs = @{ $of{$tenant} };
	return $STARTS > lost($from - $WINDOW, $to) + (grep { $_->{got} >= $from - $WINDOW && $_->{sent} <= $to } @jobs)
	  && $UNITS > lost($from - $PERIOD, $to) + (grep { $_->{free} >= $from && $_->{sent} <= $to } @jobs);
}

my ($passed, @passed) = (0);
foreach my $fetch (@fetches)
{
	foreach my $tenant (grep { $_ gt $fetch->{after} && ($fetch->{place} eq '' || $_ lt $fetch->{place}) } @tenants)
	{
		$passed++;
		push @passed, "$tenant at $fetch->{sent}" if surely_free($tenant, $fetch->{sent}, $fetch->{got});
	}
}
none(\@passed, 'no fetch passes a tenant that is free');
cmp_ok($passed, '>', $TENANTS, 'of the tenants that fetches pass');

# The time that a free tenant waits while PostgreSQL runs: since it had its last job, a start and a unit.  A job that had
# no attempt was ready.
my ($longest, $during, @late) = (0);
foreach my $tenant (@tenants)
{
	my @jobs = @{ $of{$tenant} || [] };

	foreach my $i (grep { $jobs[$_]{attempt} == 1 } 1 .. $#jobs)
	{
		my @ends = sort { $b <=> $a } map { $_->{free} } @jobs[ 0 .. $i - 1 ];
		my $since = max($jobs[ $i - 1 ]{got}, $i >= $STARTS ? $jobs[ $i - $STARTS ]{got} + $WINDOW : 0, $ends[ $UNITS - 1 ] // 0);
		my $wait = $jobs[$i]{got} - $since;

		next if $wait <= min(1, $longest) || lost($since - $PERIOD, $jobs[$i]{got}) || grep { $_->[0] < $jobs[$i]{got} && $_->[1] > $since } @down;
		my $others = grep { $_->{sent} > $since && $_->{got} < $jobs[$i]{sent} } @fetches;
		($longest, $during) = ($wait, $others) if $wait > $longest;
		# On a slow machine a second is too short for the workers to take a job of each tenant.
		push @late, "$tenant: $wait s, $others fetches" if $wait > 1 && $others > $TENANTS + $WORKERS;
	}
}
note sprintf 'measured: a tenant with a free start and a free unit waited for at most %.3f s, during %d fetches', $longest, $during;
none(\@late, 'each free tenant is served within a second, or before all others had two jobs');

is(await('the end of all units', sub {
	my $held = $session->ask(q{SELECT count(*) FROM generate_series(0, 99) n, rl_inspect('job:t' || lpad(n::text, 2, '0')) WHERE raw = 'open' AND until > now()});
	return $held eq '0' && 'free';
}), 'free', 'at the end all units are free');

done_testing();
