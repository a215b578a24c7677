# Thousands of random replies.  Each call ends with an error or with the decision
# that its reply contains.  No backend crashes, and no memory and no descriptor leaks.
#
# RATELIMIT_SEED repeats a run; RATELIMIT_STEPS is how many there are.
#
# Runs twice: no real server sends the replies.
use RatelimitTest;
use Engines;
use LyingServer;
use RandomReplies;
use Time::HiRes qw(time);

my $seed = seed();
my $dir = PostgreSQL::Test::Utils::tempdir;
my $node = new_node(RedisServer->new->start);
my @sessions = map { session($node) } 1, 2;
my $session = $sessions[0];
$session->pid;

# The SQLSTATEs of replies that are not decisions.
my $error = qr/^PT504$/;

#
# The replies that are sent, and the answers that are received
#

# A lie is a hash: the call, the steps of the reply, its name and its meaning, and a
# pattern of other SQLSTATEs that the call may end with.
my (@lies, %told);

sub lie
{
	my ($name, $call, $reply, %lie) = @_;
	my ($meaning, $verdict) = meaning($call, $reply);
	my @steps = ($reply);

	# A reply that is right before it is complete would be accepted, and an error reply
	# does not end the connection, so these are not split.
	if (delete $lie{split} && length $reply > 1 && length $reply < 500 && $reply !~ /^-.*?\r\n./s
		&& ($meaning eq 'right' || !grep { (meaning($call, substr $reply, 0, $_))[0] ne 'wrong' } 1 .. length($reply) - 1))
	{
		my $at = 1 + below(length($reply) - 1);

		@steps = chance(70) ? (substr($reply, 0, $at), substr $reply, $at) : split //, $reply;
	}

	# A call whose reply is incomplete would wait.  After an error reply the next call
	# would find the end of the connection.
	push @steps, undef if $meaning eq 'wrong' && (!is_complete($reply) || chance(20) && $reply !~ /^-/);
	push @lies, { name => $name, call => $call, reply => $reply, steps => \@steps, meaning => $meaning, verdict => $verdict,
		also => qr/^$/, %lie };
	$told{"$name, $lies[-1]{meaning}"}++;
	return;
}

sub random_lie
{
	my $call = random_call();
	my $right = right_reply($call);

	if (chance(20))
	{
		lie('right', $call, $right, split => chance(20));
		die "seed $seed: a right reply is none: $right" if $lies[-1]{meaning} ne 'right';
	}
	elsif (chance(97.5))
	{
		my ($name, $reply) = wrong_reply($call, $right);

		lie($name, $call, $reply, split => chance(5));
	}
	else
	{
		# The connection cannot be used afterwards.  The next call may notice that
		# before it sends its request or later.  If the kernel delivers all bytes at
		# once, this call may notice it.
		my $end = chance(50) ? undef : pick("+late\r\n", "\r\n", $right . "\0");

		lie('right, then an end', $call, $right, steps => [ $right, $end ]);
		$call = random_call();
		lie('after that', $call, right_reply($call), also => $error);
	}
	return;
}

# Each of two sessions gets half of the replies.  With AddressSanitizer, which is slow,
# there are fewer, but in a long run more than a hundred thousand in both runs together.  A fourth of them are made while
# the memory of a session is measured: so many that a leak of 24 bytes a call is found.
my $replies = all_seeds($ENV{RATELIMIT_STEPS} || (is_long() ? 59_000 : 12_000) - (($ENV{RATELIMIT_PRELOAD} // '') !~ /libasan/ ? 0 : is_long() ? 10_000 : 4_000));
while (@lies < $replies || @lies % 2)
{
	@RandomReplies::pool = () if reseed(scalar @lies, $replies);
	random_lie();
}
my $random = @lies;

# Replies for which a backend waits until its timeout: TRYAGAIN and missing bytes.
lie('try again', random_call(), "-TRYAGAIN Multiple keys request during rehashing of slot\r\n") foreach 1 .. 20;
while (@lies < $random + 120)
{
	my $call = random_call();
	my $right = right_reply($call);
	my $reply = substr $right, 0, below(length $right);

	# No more bytes come, or a number never ends.
	lie('silence', $call, $reply,
		steps => $reply =~ /[:*\$][-\d]*\z/ ? [ map { ($_, \0.004) } split //, $reply . '0' x 1000 ] : [$reply]);
}
my $silent = @lies;

# Replies to AUTH and SELECT; the user's name and the database select the reply.
my @greetings = map {
	my $call = random_call();
	my $right = right_reply($call);
	my @replies = map { chance(50) ? pick("+OK\r\n", "+\r\n", "+fine\r\n") : (wrong_reply($call, $right))[1] } 1 .. 2;
	# Only before version 1.0, hiredis accepts a status with a line break in it.
	s/^\+\K((?:(?!\r\n).)*)(?=\r\n\z)/$1 =~ s,[\r\n],,gr/se foreach @replies;
	my ($first, $last) = map { /^\+(?:(?!\r\n).)*\r\n\z/s ? 'right' : (() = RandomReplies::numbers($_)) ? 'odd' : 'wrong' } @replies;

	lie('greeting', $call, $right, greeting => \@replies, meaning => $last eq 'right' ? $first : 'wrong');
	\@replies
} 1 .. (is_long() ? 1000 : 250);
note 'told: ', join '; ', map { "$_ $told{$_}" } sort keys %told;

# The key selects the lie.  Each session has its own lying server.
my @liars = map { LyingServer->new(sub {
	my @request = @_;

	if ($request[0] =~ /^(?:AUTH|SELECT)$/)
	{
		my $select = $request[0] eq 'SELECT';
		my ($n) = $request[1] =~ /(\d+)/;
		my $reply = $greetings[ $n - 1 ][$select];

		return ($reply, is_complete($reply) ? () : undef);
	}
	my ($key) = grep { /^rl:\{lie:\d+\}/ } @request;
	return @{ $lies[ $key =~ /(\d+)/ ? $1 : 0 ]{steps} };
}) } @sessions;

$session->ask(q{
	CREATE UNLOGGED TABLE lie (id int PRIMARY KEY, form text, limits rl_limits, quota bigint, capacity bigint, count bigint, period float8, url text);
	CREATE UNLOGGED TABLE heard (id int, n int, state text, message text, ms float8, allowed boolean, capacity bigint,
		remaining bigint, retry_after float8, reset_after float8, source text);
	CREATE FUNCTION hear(first int, last int) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		l lie;
		key text;
		d rl_decision;
		ds rl_decision[];
		began timestamptz;
		state text;
		message text;
	BEGIN
		FOR l IN SELECT * FROM lie WHERE id BETWEEN first AND last ORDER BY id LOOP
			key := 'lie:' || l.id;
			d := NULL;
			ds := NULL;
			state := '00000';
			message := '';
			IF l.url IS NOT NULL THEN
				PERFORM set_config('ratelimit.redis_url', l.url, true);
			END IF;
			began := clock_timestamp();
			BEGIN
				CASE l.form
					WHEN 'throttle' THEN d := rl_throttle(key, l.capacity, l.count, l.period, l.quota);
					WHEN 'check' THEN d := rl_check(key, l.limits, l.quota);
					WHEN 'wait' THEN d := rl_wait(key, l.limits, l.quota, 0);
					WHEN 'allow' THEN d.allowed := rl_allow(key, l.limits, l.quota);
					WHEN 'each' THEN
						ds := ARRAY(SELECT ROW (e.allowed, e.capacity, e.remaining, e.retry_after, e.reset_after, e.rule, e.source)::rl_decision
							FROM rl_check_each(key, l.limits, l.quota) e);
					WHEN 'peek' THEN
						ds := ARRAY(SELECT ROW (e.allowed, e.capacity, e.remaining, e.retry_after, e.reset_after, e.rule, e.source)::rl_decision
							FROM rl_peek(key, l.limits, l.quota) e);
					WHEN 'refund' THEN PERFORM rl_refund(key, l.limits, l.quota);
					WHEN 'reset' THEN d.allowed := rl_reset(key);
					WHEN 'reset_limits' THEN d.allowed := rl_reset(key, l.limits);
					WHEN 'ban' THEN PERFORM rl_ban(key, 60);
					WHEN 'unban' THEN d.allowed := rl_unban(key);
				END CASE;
			EXCEPTION WHEN others THEN
				GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT;
			END;
			INSERT INTO heard
				SELECT l.id, a.n, state, message, extract(epoch FROM clock_timestamp() - began) * 1000,
					a.allowed, a.capacity, a.remaining, a.retry_after, a.reset_after, a.source
				FROM unnest(coalesce(ds, ARRAY[d])) WITH ORDINALITY a(allowed, capacity, remaining, retry_after, reset_after, rule, source, n);
		END LOOP;
	END $$;
});
open my $out, '>', "$dir/lies" or die "$dir/lies: $!";
foreach my $id (0 .. $#lies)
{
	my $call = $lies[$id]{call};
	my $limit = $call->{limits}[0];

	print $out join("\t", $id, $call->{form}, limits_text(@{ $call->{limits} }), $call->{quota}, @$limit{qw(capacity count)},
		$limit->{period} / 1e6, $lies[$id]{greeting} ? $liars[0]->url(user => 'u' . ($id - $silent + 1), db => $id - $silent + 1) : '\N'), "\n";
}
close $out or die "$dir/lies: $!";
$session->ends("\\copy lie FROM '$dir/lies'", 'the calls are in a table');

# Makes n calls of each part, given the first call; each part has its own session.
sub hear
{
	my ($n, %first_of) = @_;

	for (my $heard = 0; $heard < $n; $heard += 2000)
	{
		my %calls = map { $_ => [ $first_of{$_} + $heard, $first_of{$_} + min($heard + 2000, $n) - 1 ] } keys %first_of;

		$sessions[$_]->send("SELECT hear($calls{$_}[0], $calls{$_}[1])\n;") foreach keys %calls;
		foreach my $i (sort keys %calls)
		{
			my ($first, $to) = @{ $calls{$i} };

			$sessions[$i]->ask('');
			is($sessions[$i]->error, '', "calls $first to $to") or BAIL_OUT("seed $seed: the backend did not survive calls $first to $to");
		}
	}
	return;
}

# Returns the used memory of a backend's contexts and its private memory, both in bytes, the number
# of its descriptors, and the used bytes of contexts by name.
sub possessions
{
	my ($of) = @_;
	my %contexts = map { split /\|/ } split /\n/, $of->ask('SELECT name, sum(used_bytes) FROM pg_backend_memory_contexts GROUP BY name');

	return [ sum0(values %contexts), 1024 * $of->private_kb, $of->descriptors, \%contexts ];
}

# Returns the contexts that have grown, by names and bytes.
sub grown
{
	my ($then, $now) = @_;
	my %growth = map { $_ => $now->{$_} - ($then->{$_} // 0) } keys %$now;

	return join ', ', map { "$_ $growth{$_}" } grep { $growth{$_} > 0 } sort keys %growth;
}

my $part = $random / @sessions;
$sessions[$_]->set(redis_url => $liars[$_]->url, command_timeout => '60s') foreach 0 .. $#sessions;
my $began = time;
# With many seeds new limits come until the end, and the cache of parsed limits (src/README.md)
# would grow.  So it gets all of them before the memory is measured.
$sessions[$_]->ask(sprintf q{SELECT count(m) FROM lie, rl_check_many('{}', limits) m
	WHERE id BETWEEN %d AND %d AND form NOT IN ('throttle', 'reset', 'ban', 'unban')}, $_ * $part, ($_ + 1) * $part - 1) foreach 0 .. $#sessions;
# The caches of catalogs grow until each form was called often.
my $first = int($part / 2);
hear($first, map { $_ => $_ * $part } 0 .. $#sessions);
my @before = map { possessions($_) } @sessions;
hear($part - $first, map { $_ => $_ * $part + $first } 0 .. $#sessions);
note sprintf '%d random replies in %.1f s', $random, time - $began;
my @after = map { possessions($_) } @sessions;
my @growth = map { my $session = $_; [ map { $after[$session][$_] - $before[$session][$_] } 0 .. 2 ] } 0 .. $#sessions;
note 'memory contexts, memory and descriptors have grown by ', join '; ', map { join ', ', @$_ } @growth;
cmp_ok(max(map { $_->[0] } @growth), '<', 65_536, 'no memory context has grown')
  or diag 'grown: ', join '; ', map { grown($before[$_][3], $after[$_][3]) } 0 .. $#sessions;
cmp_ok(max(map { $_->[2] } @growth), '<', 20, 'the number of descriptors has not grown');
SKIP:
{
	skip 'AddressSanitizer keeps freed memory', 1 if slurp_file('/proc/' . $session->pid . '/maps') =~ /libasan/;
	cmp_ok(max(map { $_->[1] } @growth), '<', 1_048_576, 'the memory has not grown, not even by 24 bytes a call');
}

$session->set(command_timeout => '20ms');
hear($silent - $random, 0 => $random);
$session->set(command_timeout => '60s');
$session->with({ redis_passfile => password_file('secret') }, sub { hear(@lies - $silent, 0 => $silent) });
is($session->ask('SELECT pg_backend_pid()'), $session->pid, 'the backend is alive');

#
# The answers that were received
#

my @heard = map { [] } @lies;
$session->ask("\\copy (SELECT * FROM heard ORDER BY id, n) TO '$dir/heard'");
open my $in, '<', "$dir/heard" or die "$dir/heard: $!";
while (my $line = <$in>)
{
	chomp $line;
	my ($id, $n, @row) = map { $_ eq '\N' ? undef : $_ } split /\t/, $line;

	$row[3] = $row[3] eq 't' ? 1 : 0 if defined $row[3];
	push @{ $heard[$id] }, \@row;
}
close $in;

sub printable
{
	my ($text) = @_;

	$text =~ s/([^ -~])/sprintf '\\x%02x', ord $1/ge;
	return length $text > 1000 ? substr($text, 0, 1000) . '...' : $text;
}

my (%complaints, %outcome, @silence);

sub complain
{
	my ($class, $id, $what) = @_;
	my $lie = $lies[$id];
	my $call = $lie->{call};

	push @{ $complaints{$class} }, "lie $id ($lie->{name}): $what\n  $call->{form} of $call->{quota} under " . limits_text(@{ $call->{limits} })
	  . "\n  told \"" . printable(join '', @{ $lie->{greeting} || [] }, $lie->{reply}) . "\"\n  heard "
	  . join '; ', map { join ',', map { $_ // 'NULL' } @$_ } @{ $heard[$id] };
	return;
}

foreach my $id (0 .. $#lies)
{
	my ($lie, @rows) = ($lies[$id], @{ $heard[$id] });
	my ($call, $name, $meaning) = @$lie{qw(call name meaning)};
	my ($state, $message, $ms) = @rows ? @{ $rows[0] } : ('none', '', 0);
	my @decisions = map { [ @$_[ 3 .. 8 ] ] } @rows;

	$outcome{"$meaning, $state" . ($message =~ /^(lost the connection|unexpected reply|Redis answered)/ ? " $1" : '')}++;
	push @silence, $ms if $name eq 'silence';
	complain('a message with unprintable bytes', $id, printable($message)) if $message =~ /[^ -~]/;
	complain('a late answer', $id, "$ms ms") if $ms > ($name eq 'silence' ? 10_000 : 50_000);
	if ($state ne '00000')
	{
		complain('an unexpected SQLSTATE', $id, $message) if $state !~ $error;
		# The lie before may have ended the connection while this call was being sent.
		complain('a right reply that is not accepted', $id, $message) if $meaning eq 'right' && $state !~ $lie->{also} && $message !~ /Connection reset by peer$/
		  && !($name eq 'right, then an end' && $message =~ /it answers no command$/);
		next;
	}
	complain('a wrong reply that is accepted', $id, '') if $meaning eq 'wrong';
	complain($name eq 'greeting' ? 'an odd greeting that is accepted' : 'an odd reply that is accepted', $id, '') if $meaning eq 'odd';
	next if $meaning ne 'right' || $call->{shape} eq 'count';

	my @problems = $call->{form} eq 'allow' ? () : problems($call, @decisions);
	my $allowed = !grep { !$_->[0] } @decisions;
	complain('an odd decision', $id, join ', ', @problems) if @problems;
	complain('another verdict', $id, $lie->{verdict}) if $allowed != ($lie->{verdict} eq 'allowed')
	  || $call->{form} ne 'allow' && (grep { $_->[5] eq 'ban' } @decisions) > 0 != ($lie->{verdict} eq 'banned');
}
note 'heard: ', join '; ', map { "$_ $outcome{$_}" } sort keys %outcome;

sub never
{
	my ($class) = @_;
	my @complaints = @{ $complaints{$class} || [] };

	is(scalar @complaints, 0, "there is never $class") or diag join "\n", "RATELIMIT_SEED=$seed", @complaints[ 0 .. min(4, $#complaints) ];
	return;
}

never($_) foreach 'a message with unprintable bytes', 'a late answer', 'an unexpected SQLSTATE',
  'a right reply that is not accepted', 'a wrong reply that is accepted', 'an odd reply that is accepted',
  'an odd greeting that is accepted', 'an odd decision', 'another verdict';

@silence = sort { $a <=> $b } @silence;
cmp_ok($silence[0], '>=', 19, 'a call waits when no reply comes');
cmp_ok($silence[9], '<=', 70, 'it waits for command_timeout and at most 50 ms more');
cmp_ok($outcome{$_} || 0, '>=', $replies / 1000, "$_: " . ($outcome{$_} || 0)) foreach 'right, 00000',
  'wrong, PT504 lost the connection', 'wrong, PT504 unexpected reply', 'wrong, PT504 Redis answered';
cmp_ok($told{$_}, '>=', $replies / 10_000, "told $_: $told{$_}") foreach sort keys %told;

done_testing();
