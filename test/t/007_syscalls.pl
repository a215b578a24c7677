# A decision takes one round trip and at most four system calls.
#
# Runs alone: it counts system calls, of which a busy machine causes more.
use RatelimitTest;

my ($redis, $node, $session) = start_servers(\&new_node);
my $n = 2000;

# Half allowed, half refused.
$session->ask(qq{
	CREATE FUNCTION decide(form text, n int) RETURNS bigint LANGUAGE plpgsql AS \$\$
	DECLARE
		d rl_decision;
		allowed bigint := 0;
	BEGIN
		FOR i IN 1 .. n LOOP
			IF form = 'throttle' THEN
				d := rl_throttle('k', $n / 2, 1, 86400);
			ELSE
				d := rl_check('k', '1/1d burst $n, 1/2d burst ' || $n / 2);
			END IF;
			allowed := allowed + d.allowed::int;
		END LOOP;
		RETURN allowed;
	END \$\$;
});

#
# Redis's statistics
#

foreach my $form (qw(throttle check))
{
	$session->ask(q{SELECT rl_reset('k'), rl_throttle('k', 1, 1, 1, 0), rl_check('k', '1/1h, 1/1min', 0)});
	$redis->cli('CONFIG', 'RESETSTAT');
	is($session->ask("SELECT decide('$form', $n)"), $n / 2, "rl_$form: half are allowed");
	my $reads = $redis->field('stats', 'total_reads_processed');

	# This test itself causes a few reads.
	is($redis->calls('evalsha'), $n, "rl_$form: one script for each decision");
	cmp_ok($reads, '>=', $n, "rl_$form: Redis reads $reads times");
	cmp_ok($reads, '<=', $n + 5, "rl_$form: one round trip for each decision");
}

#
# System calls
#

my $trace = PostgreSQL::Test::Utils::tempdir . '/trace';
my ($out, $err) = ('', '');
my $strace = eval {
	IPC::Run::start([ 'strace', '-f', '-qq', '-o', $trace, '-p', $session->pid ],
		'<', \'', '>', \$out, '2>', \$err);
};

SKIP:
{
	skip 'strace is not there', 1 unless $strace;

	# strace has attached when it writes the system calls of a statement.
	my $attached = await('strace to attach', sub {
		$strace->pump_nb;
		return 'no' unless $strace->pumpable;
		$session->ask('SELECT 1');
		return -s $trace ? 'yes' : 0;
	});
	skip "strace may not trace: $err", 1 unless $attached eq 'yes';

	foreach my $form (qw(throttle check))
	{
		$session->ask(q{SELECT rl_reset('k')});
		my $from = -s $trace;
		is($session->ask("SELECT decide('$form', $n)"), $n / 2, "rl_$form under strace: half are allowed");
		$session->ask("SELECT 'end of $form'");
		await('the trace', sub { return slurp_file($trace, $from) =~ /end of $form/ });

		# Between the arrivals of this statement and the next statement.
		my ($part) = slurp_file($trace, $from) =~ /^(.*decide\('$form'.*)^.*end of $form/ms;
		my @calls = $part =~ /^\d+ +(\w+)\(/mg;
		my %count;
		$count{$_}++ foreach @calls;
		note "rl_$form, $n decisions: ", join ', ', map { "$_ $count{$_}" } sort keys %count;

		# The statement itself needs a few calls, and a busy machine may interrupt a wait.
		cmp_ok(scalar @calls, '<=', 4 * $n + 100, "rl_$form: at most four system calls for each decision");
		my $sends = 0;
		$sends += $count{$_} || 0 foreach qw(write writev sendto sendmsg);
		cmp_ok($sends, '>=', $n, "rl_$form: each request is sent");
		cmp_ok($sends, '<=', $n + 20, "rl_$form: each request is sent in one piece");
		cmp_ok($count{epoll_wait} || 0, '<=', $n + 20, "rl_$form: each reply is waited for once");
	}
	$strace->signal('INT');
	$strace->finish;
}

done_testing();
