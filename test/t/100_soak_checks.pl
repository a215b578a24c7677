# The checks of SoakChecks find one wrong call in each kind of history, and nothing in histories that
# are right.  The histories are written by hand, as clients write them.
#
# Runs once: it starts no server.
use RatelimitTest;
use Engines;
use SoakChecks;
use SoakClients;
use Time::HiRes qw(sleep);

use constant { DAY => 86_400_000_000, START => 1_700_000_100_000_000 };

# Returns the line of a server's client.  Times are in milliseconds since the start; a call takes one.
sub line
{
	my ($what, $at, @more) = @_;
	my $from = START + 1000 * $at;

	return join ' ', 0, $what, 0, $from, $from + 1000, @more;
}

sub took { my ($at, $units) = @_; return line(took => $at, $units, 'redis'); }
sub denied { my ($at, $units, $source) = @_; return line(denied => $at, $units, $source || 'redis'); }

# Returns the names of the checks that find a problem in the history of a key.
sub found
{
	my ($key, @lines) = @_;
	my ($events) = read_events(@lines);

	return join '; ', map { my ($name, undef, @problems) = @$_; @problems ? $name : () } check_key($key, $events->{0}, $key->{losses} || []);
}

sub key { my (@limits) = @_; return { kind => 'plain', limits => [ map { limit(%$_) } @limits ] }; }
sub with { my ($key, %more) = @_; return { %$key, %more }; }

my %limits = (
	throttle => { algorithm => 'throttle', capacity => 5, count => 10, period => 1_000_000 },
	token_bucket => { algorithm => 'token_bucket', capacity => 5, count => 2, period => 1_000_000 },
	fixed_window => { algorithm => 'fixed_window', capacity => 5, period => 1_000_000 },
	sliding_window => { algorithm => 'sliding_window', capacity => 5, period => 1_000_000, step => 100_000 },
	sliding_log => { algorithm => 'sliding_log', capacity => 5, period => 1_000_000 },
	'from_first' => { algorithm => 'fixed_window', capacity => 5, period => DAY, from_first => 1 },
	'calendar' => { algorithm => 'fixed_window', capacity => 5, calendar => 'month', zone => 'Asia/Kolkata' });
my ($span, $refusal, $once, $sums, $held, $ban) = key_checks();
my @five = map { took(10 * $_, 1) } 1 .. 5;

foreach my $name (sort keys %limits)
{
	my $key = key($limits{$name});
	# The bucket may get two more.
	my @full = (@five, $name eq 'token_bucket' ? (took(55, 2)) : ());

	is(found($key, @full), '', "$name: as many as it promises");
	is(found($key, @full, took(60, 1)), $span, "$name: a unit too many");
	is(found($key, @full, denied(60, 1)), '', "$name: a refusal that is right");
	is(found($key, took(1, 1), denied(60, 1)), $refusal, "$name: a refusal with no reason");
	is(found($key, took(1, 1), line(maybe => 2, 4, '-'), denied(60, 1)), '', "$name: a call without an answer is a reason");
	is(found($key, @full, line(refund => 58, 1, 'done'), took(62, 1)), '', "$name: a refund");
	is(found($key, @full, line(reset => 58, 0, 'done'), map { took($_, 1) } 62 .. 66), '', "$name: a reset");
	is(found($key, @full, line(reset => 58, 0, 'done'), map { took($_, $_ == 66 ? 4 : 1) } 62 .. 66), $span, "$name: too many after a reset");
	is(found($key, line(undone => 5, 3, 'redis', START + 8000, START + 9000), @full), '', "$name: a rollback");
	is(found(with($key, losses => [ [ START + 57_000, START + 59_000 ] ]), @full, map { took($_, 1) } 62 .. 66), '', "$name: a fail-over that loses all");
}
is(found(key(@limits{qw(fixed_window throttle)}), @five, took(400, 5), took(500, 1)), $span, 'one of two limits');

# Calls whose times are not known well may be in different windows.
is(found(key($limits{fixed_window}), (map { took(990 + $_, 1) } 1 .. 5), line(took => 999.5, 5, 'redis')), '', 'a call at the border of windows');
is(found(key($limits{fixed_window}), (map { took(990 + $_, 1) } 1 .. 5), took(998, 5)), $span, 'a call before the border');

my $lease = with(key({ algorithm => 'fixed_window', capacity => 100, period => DAY }), kind => 'lease', length => 0.05);
is(found($lease, took(1, 40), denied(5, 1)), $refusal, 'under a lease, a refusal below half of the limit');
is(found($lease, took(1, 55), denied(5, 1)), '', 'and above');
is(found($lease, line(act => 0) =~ s/act 0 .*/act 0 @{[ START ]} 0,10,60l 20,10,41/r), $span, 'actions of act()');

#
# Reservations
#

my $reserved = with(key({ algorithm => 'fixed_window', capacity => 20, period => 3650 * DAY }), kind => 'reserve');
sub id { my ($what, $at, $answer) = @_; return line($what, $at, 5, 'i', 2, $answer); }

my @right = (id(settle => 0, 'f'), id(reserve => 2, '-'), id(reserve => 4, 't|reserved'), id(extend => 6, 't'), id(settle => 8, 't'), id(settle => 10, 't'), id(extend => 12, 'f'), id(reserve => 14, 't|settled'));
is(found(with($reserved, used => [2]), @right), '', 'a reservation');
is(found(with($reserved, used => [5]), @right), $sums, 'a settlement that refunds nothing');
is(found(with($reserved, used => [0]), @right), $sums, 'a settlement that counts twice');
is(found(with($reserved, used => [4]), @right, took(20, 2)), '', 'a reservation and a call');
is(found(with($reserved, used => [7]), @right, id(reserve => 16, 't|redis')), "$once; $sums", 'an id that is forgotten at a retry');
is(found($reserved, id(reserve => 2, 't|redis'), id(reserve => 4, 't|redis')), $once, 'an id that is charged twice');
is(found($reserved, id(reserve => 2, 't|redis'), id(reserve => 4, 'f|redis')), "$refusal; $once", 'an id that is refused at a retry');
is(found($reserved, id(reserve => 2, 't|redis'), id(settle => 4, 'f')), $once, 'a settlement that finds nothing');
is(found($reserved, id(reserve => 2, 't|redis'), id(settle => 4, 't'), id(extend => 6, 't')), $once, 'an extension of what is settled');
is(found($reserved, id(reserve => 2, 't|settled')), $once, 'a settlement before any');
is(found($reserved, id(reserve => 2, 't|redis'), line(unlink => 3, 0, 'done'), id(reserve => 5, 't|redis')), '', 'rl_reset ends reservations');
my @again = (id(reserve => 2, 't|redis'), id(settle => 4, 't'), line(unlink => 6, 0, 'done'), id(reserve => 8, 't|redis'));
is(found(with($reserved, used => [5]), @again), '', 'after it a settled id is charged again');
is(found(with($reserved, used => [8]), @again), $sums, 'it is charged twice then');
is(found(with($reserved, used => [3]), id(reserve => 2, 't|redis'), line(reset => 4, 0, 'done'), took(6, 3), id(settle => 8, 't')), '', 'a settlement after a reset');
is(found(with($reserved, used => [0]), id(reserve => 2, 't|redis'), line(reset => 4, 0, 'done'), took(6, 3), id(settle => 8, 't')), $sums, 'a settlement after a reset that refunds another charge');
is(found(with($reserved, limits => [ limit(%{ $limits{fixed_window} }) ]), id(reserve => 2, 't|redis'), id(settle => 4, 't'), took(6, 4)), $span, 'a reservation counts');

#
# Other checks
#

my $concurrent = with(key({ algorithm => 'concurrent', capacity => 2, period => 100_000 }), kind => 'held');
sub hold { my ($at, $until) = @_; return line(held => $at, 1, START + 1000 * $until); }
is(found($concurrent, hold(0, 20), hold(5, 30), hold(21, 40)), '', 'as many holders as units');
is(found($concurrent, hold(0, 20), hold(5, 30), hold(15, 40)), $held, 'a holder too many');
is(found($concurrent, hold(0, 200), hold(0, 200), hold(102, 110)), '', 'a unit is free after its period');
is(found(with($concurrent, losses => [ [ START + 10_000, START + 14_000 ] ]), hold(0, 20), hold(5, 30), hold(15, 40)), '', 'a fail-over that loses units');

my $banned = key($limits{sliding_log});
is(found($banned, line(ban => 10, 1, 'done'), denied(20, 1, 'ban'), took(120, 1)), '', 'a ban');
is(found($banned, line(ban => 10, 1, 'done'), took(50, 1)), $ban, 'an action during a ban');

sub error { my ($at, $healthy, $text) = @_; return line(error => $at, START + 1000 * $healthy, $text); }
sub errors { my (undef, @errors) = read_events(@_); return map { scalar @$_ } error_problems(\@errors, [ START + 10_000, START + 20_000, START + 40_000 ]); }
is(join(' ', errors(error(50, 20, 'PT504 lost the connection'), error(30, 5, 'PT504 not retrying'), error(50, 45, 'PT504 not retrying'), error(30, 20, '57014 cancelled'))),
	'0 0', 'errors that a fault explains');
is(join(' ', errors(error(30, 15, 'PT504 not retrying Redis yet'))), '0 1', 'a session that is cut off from a Redis that answers');
is(join(' ', errors(error(30, 15, 'XX000 unexpected'))), '1 0', 'an internal error');

# A client's connection works if Redis has answered it, unless the end of a transaction may have reset it since.
{
	my ($client, $takes) = (bless({ healthy => 0 }, 'SoakClients'), 0);

	no warnings 'once';
	local *SoakClients::ask = sub { sleep $takes; return 't|redis' };
	await('a fast call', sub { $client->call('SELECT'); return $client->{healthy} });
	pass('the connection works that has just had an answer');
	$takes = 0.1;
	$client->call('SELECT');
	is($client->{healthy}, 0, 'it may have been reset when a command took 100 ms');
}

done_testing();
