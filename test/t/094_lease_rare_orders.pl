# Leases: rare orders of events.  No unit is lost that could be refunded, and none is
# refunded that was deleted.
#
# The clocks of Redis and of the servers are virtual.  Sessions that write the path of
# one Redis in different ways are servers of their own where leases are concerned.
#
# Runs once: leases are C only, and 047_lease takes some in each row.
use RatelimitTest;
use LeaseServers qw(SECOND START);
use LyingServer;
use Time::HiRes ();

my $redis = RedisServer->new->start;
my $node = shared_node($redis);
my $hour = 'fixed_window 100000/1h lease 50ms';
my $folder = PostgreSQL::Test::Utils::tempdir_short;
my $link = "$folder/redis";

# Makes new connections to the link go to this socket.
sub link_to
{
	my ($path) = @_;

	unlink "$link.new";
	symlink($path, "$link.new") && rename("$link.new", $link) or die "$link: $!";
	return;
}

# Returns a session at a time, with this path of a socket.
sub client
{
	my ($path) = @_;
	my $session = session($node);

	$session->set(redis_url => "unix://$path", command_timeout => 180_000, on_error => 'error');
	at($session, 0);
	return $session;
}

# Sets the session's clocks to so many microseconds after the start.
sub at
{
	my ($session, $us) = @_;

	$session->set(debug_now => START + $us, debug_clock => 1_000 * SECOND + $us);
	return;
}

# Returns the sources of so many calls, one for each run of the same.
sub sources
{
	my ($session, $key, $limits, $n, $quota) = @_;
	my $all = $session->ask(sprintf q{SELECT string_agg((rl_check('%s', '%s', %d)).source, ' ') FROM generate_series(1, %d)},
		$key, $limits, $quota || 1, $n);

	return $all =~ s/\b(\w+)( \1\b)+/$1/gr;
}

sub used
{
	my ($session, $key, $limits) = @_;

	return $session->ask("SELECT capacity - remaining FROM rl_peek('$key', '$limits', 0)");
}

my $one = client($redis->socket);
my $two = client('/' . $redis->socket);

#
# Calls under way
#

# Returns a server that answers a call that has a word when the file is there.
sub slow_server
{
	my ($file, $word, $answer) = @_;

	return LyingServer->new(sub {
		return ":0\r\n" unless grep { $_ eq $word } @_;
		for (my $i = 0; $i < 18_000 && !-e $file; $i++)
		{
			Time::HiRes::sleep(0.01);
		}
		return $answer;
	});
}

# Lets a call of a lease be under way while something happens.  Returns the source of the next call.
sub source_after
{
	my ($name, $happen) = @_;
	my $file = "$folder/$name";
	my $limits = '10000/1s lease 50ms';
	my $liar = slow_server($file, '50000', "*7\r\n:0\r\n:0\r\n:1\r\n:0\r\n:16\r\n:50000\r\n:1\r\n");
	my $asks = client($liar->path);

	sources($asks, $name, $limits, 16);
	my $before = $liar->requests;
	$asks->send("SELECT rl_check('$name', '$limits');");
	await('the call of a lease', sub { return $liar->requests > $before });
	$happen->($liar);
	append_to_file($file, '');
	$asks->ask("SELECT 1");
	my $source = sources($asks, $name, $limits, 1);
	$asks->quit;
	return $source;
}

is(source_after('alone', sub { }), 'lease', 'a grant is stored');
# There are 256 sets of keys.
is(source_after('others', sub { $one->ask(q{SELECT count(rl_unban('other ' || i)) FROM generate_series(1, 10000) i}) }),
	'lease', 'repairs of other keys do not matter to a grant that was asked for before them');
is(source_after('reset', sub {
	my ($liar) = @_;
	my $resets = client($liar->path);

	$resets->set(command_timeout => 100);
	like($resets->attempt(q{SELECT rl_reset('reset')})->{message} // '', qr/timeout/, 'a reset fails');
	$resets->quit;
}), 'redis', 'but a reset of its key does');

# A session whose ban is under way, while another session is granted a lease.
{
	my $file = "$folder/banned";
	my $liar = slow_server($file, '1000001', ":1\r\n");

	link_to($liar->path);
	my $bans = client($link);
	$bans->ask(q{SELECT rl_check('other', '5/1s')});
	link_to($redis->socket);
	my $asks = client($link);
	is(sources($asks, 'ban', $hour, 16), 'redis', 'a key without a lease');
	my $before = $liar->requests;
	$bans->send(q{SELECT rl_ban('ban', 1.000001);});
	await('the ban', sub { return $liar->requests > $before });
	is(sources($asks, 'ban', $hour, 2), 'redis lease', 'a lease is granted while a ban is under way');
	append_to_file($file, '');
	$bans->ask("SELECT 1");
	is(used($asks, 'ban', $hour), 18, 'the ban ends the lease, and its units are refunded');
	$_->quit foreach $bans, $asks;
}

#
# Ends of leases
#

is(sources($one, 'peek', $hour, 18), 'redis lease', 'a lease');
$two->ask(q{SELECT rl_ban('peek', 1)});
is($one->ask("SELECT source FROM rl_peek('peek', '$hour')"), 'ban', 'rl_peek reports a ban');
is(sources($one, 'peek', $hour, 1), 'ban', 'and ends the lease');

is(sources($one, 'starts', $hour, 18), 'redis lease', 'a lease');
$one->ask(q{SELECT rl_check('starts', '1/1h ban 1s after 1', 1) FROM generate_series(1, 2)});
is(sources($one, 'starts', $hour, 1), 'ban', 'a refusal that starts a ban ends the lease');

is(sources($one, 'other state', $hour, 18), 'redis lease', 'a lease');
$one->ask(q{SELECT rl_reset('other state', '5/1s')});
is(used($one, 'other state', $hour), 18, 'a reset of another state refunds what is left');

# Leases with more units than are handed out, because each call takes several.
{
	my $limits = 'fixed_window 1000000/1h lease 1s';
	my ($calls, $leased) = (0, 0);

	foreach my $round (0 .. 9)
	{
		at($one, $round * 2_000);
		$calls += 40;
		sources($one, 'several', $limits, 40, 1 + 10 * $round);
	}
	at($one, 10 * SECOND);
	is(used($one, 'several', $limits), 40 * (10 + 10 * 45), 'no unit of many grants is lost');
}

#
# A reset by another server
#
# What is left of a lease that was charged before is not refunded after it.
#

# Takes quota so many times.  Returns how many calls are allowed.
sub allowed
{
	my ($session, $key, $limits, $n) = @_;

	return $session->ask("SELECT count(*) FILTER (WHERE (rl_check('$key', '$limits')).allowed) FROM generate_series(1, $n)");
}

my %resets = (
	'rl_reset of the key' => sub { my ($key) = @_; $two->ask("SELECT rl_reset('$key')") },
	'rl_reset of the state' => sub { my ($key, $limits) = @_; $two->ask("SELECT rl_reset('$key', '$limits')") },
	'DEL' => sub { my ($key) = @_; $redis->cli('DEL', "rl:{$key}") });

foreach my $case ([ 'fixed_window 100/1h lease 1s', 100 ], [ '100/1h burst 200 lease 1s', 199 ])
{
	my ($limits, $capacity) = @$case;

	foreach my $reset (sort keys %resets)
	{
		# Of few calls none takes a lease.
		foreach my $calls (5, 250)
		{
			foreach my $by (qw(rl_check rl_peek))
			{
				my $name = "$limits, $reset, $calls calls, $by";
				my $passed = min($calls, $capacity);

				at($_, 0) foreach $one, $two;
				is(sources($one, $name, $limits, 18), 'redis lease', "$name: a lease");
				$resets{$reset}->($name, $limits);
				at($_, 10 * SECOND) foreach $one, $two;
				is(allowed($two, $name, $limits, $calls), $passed, "$name: $passed pass after the reset");
				if ($by eq 'rl_check')
				{
					my $fits = $passed < $capacity ? 1 : 0;

					is(allowed($one, $name, $limits, 1), $fits, "$name: and the next call of the first server is " . ($fits ? 'allowed' : 'refused'));
					$passed += $fits;
				}
				else
				{
					used($one, $name, $limits);
				}
				is(used($two, $name, $limits), $passed, "$name: nothing is refunded");
			}
		}
	}
}

# The field that names the key's life
{
	my $fields = sub { my ($key) = @_; return join ' ', sort @{ $redis->cli('HKEYS', "rl:{$key}") } };

	at($_, 20 * SECOND) foreach $one, $two;
	sources($one, 'life', $hour, 17);
	is($fields->('life'), 'expiry fixed_window:3600000000 lease', 'the first grant adds the field');
	my $life = $redis->cli('HGET', 'rl:{life}', 'lease');
	cmp_ok(abs($life / SECOND - $redis->cli('TIME')->[0]), '<', 3600, "its value is a time by Redis's own clock");
	at($one, 21 * SECOND);
	sources($one, 'life', $hour, 17);
	is($redis->cli('HGET', 'rl:{life}', 'lease'), $life, 'the next grant keeps it');
	$two->ask(q{SELECT rl_ban('life', 1), rl_unban('life'), rl_reset('life', '5/1s')});
	is($redis->cli('HGET', 'rl:{life}', 'lease'), $life, 'the end of a ban, and a reset of a state that is not there, keep it');
	is($two->ask("SELECT string_agg(state, ' ') FROM rl_inspect('life')"), 'fixed_window:3600000000', 'rl_inspect does not show it');
	$two->ask(q{SELECT rl_check('life', 'sliding_log 5/2h'), rl_reset('life', '} . $hour . q{')});
	is($fields->('life'), 'expiry sliding_log:7200000000', 'a reset of a state deletes it');
	$redis->cli('HSET', 'rl:{life}', 'lease', $life);
	$two->ask(q{SELECT rl_reset('life', 'sliding_log 5/2h')});
	is($fields->('life'), '', 'a key that has only this field and its expiry is deleted');
}

#
# A full table
#

is(sources($one, 'stays', $hour, 18), 'redis lease', 'a lease');
$one->ask(q{SELECT count(rl_check('flood ' || n, '1/1h')) FROM generate_series(1, 6000) n, generate_series(1, 2)});
is(sources($one, 'stays', $hour, 1), 'lease', 'a flood of denials evicts no lease');
is(sources($one, 'refused', '1/1h', 3), 'redis denial_cache', 'a denial');
$one->ask("SELECT count(rl_check('lease ' || n, '$hour')) FROM generate_series(1, 6000) n");
is(sources($one, 'refused', '1/1h', 1), 'denial_cache', 'a flood of leased keys evicts no denial');
is(sources($one, 'stays', $hour, 1), 'lease', 'nor a lease that has units');
is($one->ask('SELECT lease_keys BETWEEN 3900 AND lease_max_keys FROM rl_status()'), 't', 'the table is full of leases');

$_->quit foreach $one, $two;
done_testing();
