# From PostgreSQL 17 on, without shared_preload_libraries: the first session that needs
# shared memory creates it.  All sessions use the same memory, and libraries of two
# layouts run in one server.
#
# Runs alone: it fills /dev/shm, which all servers use.
use RatelimitTest;
use File::Copy qw(move);

plan skip_all => 'before PostgreSQL 17, shared memory needs the library in shared_preload_libraries' if !needs_no_preload();

delete $ENV{RATELIMIT_SHARED};
my $redis = RedisServer->new->start;
# A breaker that opens stays open.
my $node = shared_node($redis, 'ratelimit.retry_interval = 1h');
my $session = session($node);

# Returns the output of the command in a new session, or an empty string if it fails.
sub new_session
{
	my ($sql) = @_;
	my ($status, $output) = $node->psql('postgres', $sql);

	return $status ? '' : $output;
}

is($session->ask('SHOW shared_preload_libraries'), '', 'the library is not preloaded');

# Returns the bytes of the dynamic shared memory that a session has mapped.
sub mapped
{
	my ($of) = @_;
	no warnings 'portable';

	return sum0(map { m{^([0-9a-f]+)-([0-9a-f]+) .* /dev/shm/PostgreSQL} ? hex($2) - hex($1) : () } split /\n/, slurp_file('/proc/' . $of->pid . '/maps'));
}

#
# The memory of the local store is created by the first call that needs it
#

my $local_fill = 'SELECT local_keys, local_max_keys, local_entries, local_max_entries > 400000, local_evicted FROM rl_status()';
is($session->ask(q{SELECT source FROM rl_check('k', '1000/1h'); SELECT count(*) FROM rl_stat}), "redis\n1", 'with Redis, there is shared memory');
is($session->ask($local_fill), '0|100000|0|t|0', 'rl_status shows an empty local store');
cmp_ok(mapped($session), '<', 17 * 2**20, 'which has no memory: ' . mapped($session));
my $second = session($node);
$session->set(on_error => 'local');
is($session->ask(q{SELECT source FROM rl_check('k2', '1/1h')}), 'redis', 'on_error = local needs the memory');
cmp_ok(mapped($session), '>', 30 * 2**20, 'it is created: ' . mapped($session));
$session->set(store => 'local');
$session->ask(q{SELECT rl_check('l', '1/1h')});
is($second->ask($local_fill), '1|100000|0|t|0', 'rl_status of another session attaches it');
$second->set(store => 'local');
is($second->ask(q{SELECT source, remaining FROM rl_check('l', '9/1h burst 1')}), 'local|0', 'and so does a call');
$second->ask(q{SELECT rl_check('back', 'sliding_log 3/1d refund_on_abort'); BEGIN; SELECT rl_check('back', 'sliding_log 3/1d refund_on_abort'); ROLLBACK});
is($session->left('sliding_log 3/1d', 'back'), 2, 'a rollback refunds there');
$second->quit;
start_node($node, 'restart');
$session = session($node);

#
# One memory
#

# Clients whose first calls come at the same time create one memory, not several.
foreach my $round (1 .. 5)
{
	my $run = start_clients($node, "first $round", "SELECT rl_allow('first:$round', '1000/1d');", '-t', 1, '-c', 16);

	finish_clients($run);
	is(new_session('SELECT scope, allowed FROM rl_stat'), 'first|16', "round $round: 16 first calls are counted together");
	start_node($node, 'restart');
	$session = session($node);
}
my $other = session($node);
$_->set(debug_now => '1700000000000000', debug_clock => '1000000') foreach $session, $other;
$session->ask(q{SELECT rl_allow('k', '1/1h') FROM generate_series(1, 2)});
is($other->ask('SELECT key, limits FROM rl_denied'), 'k|throttle 1/1h', 'another session sees the refusal');
is($other->ask(q{SELECT source FROM rl_check('k', '1/1h')}), 'denial_cache', 'its calls are refused by the cache');
$session->ask(q{SELECT rl_allow('leased', 'fixed_window 1000/1h lease 50ms') FROM generate_series(1, 17)});
is($other->ask(q{SELECT source FROM rl_check('leased', 'fixed_window 1000/1h lease 50ms')}), 'lease', 'another session uses the lease');
$_->set(debug_now => undef, debug_clock => undef) foreach $session, $other;
$session->set(store => 'local');
$other->set(store => 'local');
$session->ask(q{SELECT rl_allow('local', '3/1h')});
is($other->ask(q{SELECT remaining, source FROM rl_check('local', '3/1h')}), '1|local', 'the local store serves both sessions');
$_->ask('RESET ratelimit.store') foreach $session, $other;
$redis->stop;
is($session->attempt(q{SELECT rl_allow('down', '3/1h')})->{state}, 'PT504', 'Redis is down');
like($other->ask('SELECT breaker FROM rl_status()'), qr/^(?:connect-failed|half-open)$/, 'the other session has the same breaker');
$redis->start;
unlike(slurp_file($node->logfile), qr/could not create the shared memory/, 'nothing about the memory is logged');

# A session that has not called anything yet.
is(new_session('SELECT local_max_keys, stat_since < now() FROM rl_status()'), '100000|t', 'rl_status attaches the memory');
is(new_session('SELECT count(*) > 0 FROM rl_stat'), 't', 'and so does rl_stat');

# The size is that of the settings when the memory was created.
$node->append_conf('postgresql.conf', 'ratelimit.local_max_keys = 500');
$node->reload;
await('the setting to change', sub { return new_session(q{LOAD 'ratelimit'; SHOW ratelimit.local_max_keys}) eq '500' });
is(new_session('SELECT local_max_keys FROM rl_status()'), '100000', 'a later setting does not change the size');
$session->ask('SET ratelimit.local_max_keys = 100');
like($session->error, qr/ERROR:  55P02: parameter "ratelimit.local_max_keys" cannot be changed now/, 'no session can change it');
start_node($node, 'restart');
is(new_session('SELECT local_max_keys FROM rl_status()'), '500', 'after a restart it is used');

# A killed backend makes the server start again, with new memory.
$node->append_conf('postgresql.conf', 'restart_after_crash = on');
$node->reload;
$session = session($node);
$session->ask(q{SELECT rl_allow('before', '3/1h')});
is($session->ask(q{SELECT scope IS NULL, allowed FROM rl_stat}), 't|1', 'one call is counted');
kill 'KILL', $session->pid;
await('new memory', sub { return new_session('SELECT count(*) FROM rl_stat') eq '0' });

#
# Libraries of two layouts: a package is upgraded under open sessions
#

# Returns a build of the extension whose table of known keys, and so its layout, differs.
sub other_build
{
	my $folder = PostgreSQL::Test::Utils::tempdir;
	my ($source, $output) = ("$folder/source", '');

	mkdir $source;
	return undef if !IPC::Run::run([ 'cp', '-r', 'Makefile', 'ratelimit.control', 'sql', 'src', $source ], '>&', \$output);
	foreach ([ 'known.c', qr/(#define DENIALS\s+)8/, '16' ], [ 'shared.c', qr/(#define LAYOUT\s+)(\d+)/, '99' ])
	{
		my ($file, $pattern, $value) = @$_;
		my $text = slurp_file("$source/src/shared/$file");

		$text =~ s/$pattern/$1$value/ or die "$file has no $pattern";
		unlink "$source/src/shared/$file";
		append_to_file("$source/src/shared/$file", $text);
	}
	IPC::Run::run([ 'make', '-s', '-C', $source, 'PG_CONFIG=pg_config', 'with_llvm=no' ], '>&', \$output) or diag($output), return undef;
	return "$source/ratelimit.so";
}

SKIP:
{
	my $new = other_build() or skip 'the sources cannot be built here', 1;
	my $folder = PostgreSQL::Test::Utils::tempdir;
	my $library = "$folder/ratelimit.so";

	chomp(my $installed = qx(pg_config --pkglibdir));
	IPC::Run::run([ 'cp', "$installed/ratelimit.so", $library ]) or die 'no library';
	$node->append_conf('postgresql.conf', "debug_parallel_query = on\nratelimit.local_max_keys = 100000");
	start_node($node, 'restart');
	$node->safe_psql('postgres', "UPDATE pg_proc SET probin = '$library' WHERE probin LIKE '%ratelimit%'");

	my @old = map { session($node) } 1 .. 2;
	# Calls of all parts of shared memory, and in a parallel worker, which loads the new library.
	my $all = sub {
		my ($session, $name) = @_;

		$session->ends(q{SELECT rl_allow('refused', '1/1h') FROM generate_series(1, 3)}, "$name: limits by Redis");
		like($session->ask('SELECT key FROM rl_denied'), qr/^refused$/m, "$name: rl_denied");
		$session->ask(q{SET ratelimit.store = local; SELECT rl_check('w' || i, 'sliding_log 20/1h, 3/1h', 3), rl_ban('b' || i, 9) FROM generate_series(1, 300) i});
		is($session->error, '', "$name: the local store");
		is($session->ask(q{SELECT count(*) > 0 FROM rl_bans()}), 't', "$name: bans");
		$session->ask('RESET ratelimit.store');
		is($session->ask(q{SELECT rl_key('a', relname) FROM pg_class WHERE relname = 'pg_class'}), 'a:pg_class', "$name: a parallel worker");
		return;
	};
	$all->($_, 'before the upgrade') foreach @old;
	$old[0]->set(store => 'local');
	is($old[0]->ask(q{SELECT rl_allow('shared', '2/1h')}), 't', 'before the upgrade: the local store counts');

	move($new, "$library.new") && rename("$library.new", $library) or die "rename: $!";
	my @new = map { session($node) } 1 .. 2;
	for my $round (1 .. 2)
	{
		$all->($_, "old session, round $round") foreach @old;
		$all->($_, "new session, round $round") foreach @new;
	}
	$_->set(store => 'local') foreach @old, @new;
	is($old[1]->ask(q{SELECT rl_allow('shared', '2/1h')}), 't', 'old sessions share a count');
	is($old[1]->ask(q{SELECT rl_allow('shared', '2/1h')}), 'f', 'and its limit');
	is($new[0]->ask(q{SELECT rl_allow('shared', '2/1h')}), 't', 'new sessions have a count of their own');
	is($new[1]->ask(q{SELECT remaining FROM rl_check('shared', '2/1h')}), '0', 'which they share');
	$_->ask('RESET ratelimit.store') foreach @old, @new;
	$old[1]->ask(q{SELECT rl_allow('by redis', '2/1h')});
	is($new[1]->ask(q{SELECT remaining FROM rl_check('by redis', '2/1h')}), '0', 'Redis counts for both');
	$_->quit foreach @old;
	$all->($new[0], 'after the last old session');
	unlike(slurp_file($node->logfile), qr/TRAP|PANIC|was terminated by signal 11|could not create the shared memory/, 'no session has crashed');
}

#
# A full /dev/shm
#

SKIP:
{
	skip 'RATELIMIT_FILL_SHM does not allow to fill /dev/shm', 1 if !$ENV{RATELIMIT_FILL_SHM};
	my $full = "/dev/shm/ratelimit.$$";
	my $failure = qr/LOG:  could not create the shared memory of ratelimit\n/;

	$node->append_conf('postgresql.conf', 'debug_parallel_query = off');
	$node->stop;
	start_node($node);
	$node->safe_psql('postgres', q{UPDATE pg_proc SET probin = 'ratelimit' WHERE probin LIKE '%ratelimit%'});
	open my $file, '>', $full or die "$full: $!";
	# To the last byte.
	1 while defined syswrite $file, "\0" x 65536;
	1 while defined syswrite $file, "\0";
	# Room for all but the local store.
	truncate $file, (-s $full) - 18 * 2**20;
	sysseek $file, 0, 2;
	my $small = session($node);
	is($small->ask(q{SELECT source FROM rl_check('small', '3/1h'); SELECT allowed FROM rl_stat; SET max_parallel_workers_per_gather = 2;
		SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0; SELECT count(*) > 0 FROM pg_class}), "redis\n1\nt",
		'small: statistics, and a parallel query');
	is($small->attempt(q{SET ratelimit.store = local; SELECT rl_allow('small', '3/1h')})->{state}, '55000', 'small: no local store') foreach 1 .. 2;
	is(count_of(qr/LOG:  could not create the shared memory of ratelimit's local store\n/, new_log($node)), 1, 'small: the log says so once');
	is($small->ask(q{RESET ratelimit.store; SELECT source FROM rl_check('small', '3/1h')}), 'redis', 'small: Redis decides');
	$node->stop;
	start_node($node);
	1 while defined syswrite $file, "\0" x 65536;
	1 while defined syswrite $file, "\0";
	new_log($node);
	my $began = time;
	my $last = session($node);
	is($last->ask(q{SELECT source FROM rl_check('full', '3/1h')}), 'redis', 'full: Redis decides');
	my $log = new_log($node);
	is(count_of($failure, $log), 1, 'full: the log says so');
	like($log, qr/DETAIL:  could not resize shared memory segment ".*" to \d+ bytes: No space left on device$/m, 'full: and why');
	$last->ask('SELECT rl_stat()');
	like($last->error, qr/ERROR:  55000: rl_stat needs shared memory$/m, 'full: rl_stat says that there is none');
	for (1 .. 50)
	{
		is(new_session(q{SELECT source FROM rl_check('others', '300/1h')}), 'redis', 'full: new sessions work');
	}
	cmp_ok(count_of($failure, new_log($node)), '<=', (time - $began) / 60, 'full: they log nothing within a minute');

	# Room is found at the next attempt, a minute after the first.
	close $file;
	unlink $full;
	is(new_session('SELECT count(*) FROM rl_stat'), '', 'the next attempt is a minute after the first') if time - $began < 55;
	await('the memory', sub { return new_session('SELECT local_keys IS NOT NULL FROM rl_status()') eq 't' });
	cmp_ok(time - $began, '>=', 59, 'once a minute');
	await('the first session to attach it', sub { return $last->ask('SELECT local_keys IS NOT NULL FROM rl_status()') eq 't' });
	$redis->stop;
	is($last->attempt(q{SELECT rl_allow('down', '3/1h')})->{state}, 'PT504', 'Redis is down');
	await('a call that fails at once', sub { return $last->attempt(q{SELECT rl_allow('down', '3/1h')})->{message} =~ /^not retrying Redis/ });
	pass('the first session has a breaker now');
	is(count_of($failure, new_log($node)), 0, 'nothing more is logged');
}

done_testing();
