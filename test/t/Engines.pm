# Limits and acts on both engines: on C's by test/engine.c, a step at a time,
# and on Redis's through SQL, a batch at a time in virtual time.
#
# A limit is a hash: algorithm, capacity, count, period, and if it has them
# step, from_first, calendar (a unit, in UTC), count_denied, ban, ban_to, ban_after, shadow.  A step is a hash too: form,
# key, now, argument (the quota, or a ban's length), limits, and if some of
# these have refund_on_abort, refunds: a true value at the index of each.  The
# key's next step "abort" refunds their charges, unless a step "begin" comes
# before it.  Charges to concurrent limits are refunded by both.  A step "all" has
# parts: hashes with key, argument, limits and refunds.  For "begin" and "abort", a
# step's group counts like a key.  Durations are in microseconds.
#
# An answer is the combined decision, followed by the decision of each limit; to
# "all" it is the combined decision of each key.  A
# decision is [allowed, capacity, remaining, retry_after, reset_after, source],
# with a retry_after of undef where SQL has NULL.  A decision of C's engine has a
# seventh element, the wait: -1 if no wait will help, otherwise 0 or more.  A limit
# that would have allowed a refused action can have a wait.
package Engines;

use strict;
use warnings FATAL => 'all';

use Digest::SHA qw(sha1_hex);
use Exporter 'import';
use Fcntl qw(LOCK_EX);
use FindBin;
use IPC::Open2;
use IPC::Run;
use List::Util qw(max min sum0);
use PostgreSQL::Test::Utils;

our @EXPORT = qw(MAX_PERIOD seed all_seeds reseed below log_uniform chance pick limit limits_text random_tags random_limit
	decision_text binding_decision answer_difference state_name c_program c_engine c_step redis_engine redis_steps redis_begin redis_answers);

# Ten years.
use constant MAX_PERIOD => 315_576_000_000_000;

# Without RATELIMIT_SEED the seed is the same each time, so that a failure comes from a
# change.  RATELIMIT_SEEDS is the number of seeds, from this one on.
my $seed = $ENV{RATELIMIT_SEED} || 20261121;
my $seeds = $ENV{RATELIMIT_SEEDS} || 1;
my ($used, %steps) = (0);

# Seeds the random numbers; returns the first seed.
sub seed
{
	srand($seed);
	Test::More::note("RATELIMIT_SEED=$seed RATELIMIT_SEEDS=$seeds");
	return $seed;
}

# Returns how many steps all seeds take together: as many as a single seed, but at least
# so many each, usually one.
sub all_seeds { my ($n, $least) = @_; return max($n, $seeds > 1 ? $seeds * ($least || 1) : 0); }

# Takes the next seed if it is due after so many of all steps; then returns it, and
# otherwise 0.
sub reseed
{
	my ($done, $all) = @_;
	my $due = min(int($done * $seeds / $all), $seeds - 1);

	$steps{ join ' ', (caller)[ 1, 2 ] }{$due}++;
	return 0 if $due == $used;
	$used = $due;
	srand($seed + $used);
	return $seed + $used;
}

END
{
	Test::More::note("measured: a loop with ", scalar keys %$_, ' seeds, and ', sum0(values %$_), ' steps') foreach $seeds > 1 ? values %steps : ();
}

# Random values: a whole number from 0 to n - 1; a whole number from 1 to n, with
# small numbers as likely as large numbers; true with this probability; an element.
sub below { my ($n) = @_; return $n < 2 ? 0 : int(rand($n)); }
sub log_uniform { my ($n) = @_; return 1 + int(exp(rand(log($n + 1))) - 1); }
sub chance { my ($percent) = @_; return rand(100) < $percent; }
sub pick { return $_[ rand @_ ]; }

#
# Limits
#

my %algorithm_number = (throttle => 0, token_bucket => 1, fixed_window => 2,
	sliding_window => 3, sliding_log => 4, concurrent => 5);

# Units of a calendar, as RlCalendar numbers them, with the time that C takes for their period.
my @calendars = ('', qw(day week month quarter year));
my @longest = (0, map { ($_ + 1) * 86_400_000_000 } 1, 7, 31, 92, 366);

# Returns a limit with all values that the engines need.
sub limit
{
	my (%limit) = @_;
	use integer;

	$limit{capacity} ||= $limit{count};
	$limit{count} ||= $limit{capacity};
	$limit{step} = 0 unless $limit{algorithm} eq 'sliding_window';
	$limit{$_} ||= 0 foreach qw(from_first count_denied ban ban_to ban_after shadow);
	$limit{ban_to} = 0 unless $limit{ban};
	$limit{calendar} ||= '';
	my ($calendar) = grep { $calendars[$_] eq $limit{calendar} } 0 .. $#calendars;
	$limit{interval_ns} = $limit{algorithm} eq 'throttle' ? $limit{period} * 1000 / $limit{count} : 0;
	$limit{numbers} = join ' ', $algorithm_number{ $limit{algorithm} },
	  @limit{qw(capacity count)}, $longest[$calendar] || $limit{period},
	  @limit{qw(interval_ns step from_first count_denied ban ban_to ban_after shadow)}, $calendar;
	$limit{text} = "$limit{algorithm} $limit{count}/" . ($calendar ? "$limit{calendar} in UTC" : "$limit{period}us")
	  . ($limit{capacity} != $limit{count} ? " burst $limit{capacity}" : '')
	  . ($limit{step} ? " step $limit{step}us" : '')
	  . ($limit{from_first} ? ' from_first' : '')
	  . ($limit{count_denied} ? ' count_denied' : '')
	  . ($limit{ban} ? " ban $limit{ban}us" . ($limit{ban_to} ? " to $limit{ban_to}us" : '') . " after $limit{ban_after}" : '')
	  . ($limit{shadow} ? ' shadow' : '');
	$limit{single} = !$limit{from_first} && !$calendar && !$limit{count_denied} && !$limit{ban} && !$limit{shadow};
	return \%limit;
}

sub limits_text { return join ', ', map { $_->{text} } @_; }

# Returns a random state tag, with options.
my @periods = (1, 7, 1_000, 250_000, 1_000_000, 10_000_000, 12_345_678, 60_000_000,
	3_600_000_000, 86_400_000_000, 2_592_000_000_000, MAX_PERIOD);

sub random_tag
{
	my ($algorithm, $period) = @_;
	my %tag = (algorithm => $algorithm, period => $period);

	$tag{step} = $period / pick(grep { $period % $_ == 0 } 1, 2, 3, 4, 5, 6, 7, 10, 60, 100)
	  if $algorithm eq 'sliding_window';
	if ($algorithm eq 'fixed_window')
	{
		my $calendar = chance(30) ? 1 + below($#calendars) : 0;

		$tag{from_first} = 1 if !$calendar && chance(50);
		@tag{qw(calendar period)} = ($calendars[$calendar], $longest[$calendar]) if $calendar;
	}
	$tag{count_denied} = 1 if $algorithm =~ /window|log/ && chance(30);
	if (chance(20))
	{
		$tag{ban} = min(MAX_PERIOD, chance(20) ? log_uniform(MAX_PERIOD) : 1 + below(2 * $period));
		$tag{ban_to} = min(MAX_PERIOD, $tag{ban} + below(log_uniform(100) * $tag{ban})) if chance(50);
		$tag{ban_after} = 1 + below(4);
	}
	elsif (chance(20))
	{
		$tag{shadow} = 1;
	}
	return \%tag;
}

sub same_tag
{
	my ($a, $b) = @_;
	my @tag = qw(algorithm period step from_first calendar shadow);

	return join('|', map { $_ || 0 } @$a{@tag}) eq join('|', map { $_ || 0 } @$b{@tag});
}

# Returns one to eight tags that a list can have, many with the wanted algorithm; only
# then some may be concurrent.
sub random_tags
{
	my ($wanted) = @_;
	my @algorithms = grep { $wanted || $_ ne 'concurrent' } sort keys %algorithm_number;
	my $n = chance(62) ? 1 : chance(70) ? 2 : chance(60) ? 3 : 4 + below(5);
	my $base = pick(@periods);
	my @tags;

	while (@tags < $n)
	{
		my $period = @tags == 0 || chance(25) ? $base
		  : chance(50) ? min($base * (1 + below(20)), MAX_PERIOD)
		  :              max(1, int($base / (1 + below(20))));
		my $tag = random_tag($wanted && chance(40) ? $wanted : pick(@algorithms), $period);

		push @tags, $tag unless grep { same_tag($_, $tag) } @tags;
	}
	return @tags;
}

# Returns a limit of the tag with random numbers, or with numbers near the base's.
sub random_limit
{
	my ($tag, $base) = @_;
	my $most = $tag->{algorithm} eq 'sliding_log' ? 100_000 : $tag->{algorithm} eq 'concurrent' ? 1000 : 10**15;
	my $near = sub { return min($most, max(1, chance(50) ? $_[0] + below(5) - 2 : int($_[0] * (0.3 + rand(1.7))))) };

	while (1)
	{
		my %limit = %$tag;

		$limit{capacity} = $base ? $near->($base->{capacity})
		  : min($most, log_uniform(chance(10) ? $most : 25));
		$limit{count} = $limit{algorithm} !~ /throttle|token/ ? $limit{capacity}
		  : $base ? $near->($base->{count}) : log_uniform(chance(10) ? 10**12 : 30);

		# An interval of few nanoseconds, so that each of them matters.
		if ($limit{algorithm} eq 'throttle' && ($base ? $base->{interval_ns} < 3000 && chance(50) : chance(25)))
		{
			$limit{count} = min(10**15, max(1, int($limit{period} * 1000 / (1 + below(pick(5, 3000))))));
			$limit{capacity} = log_uniform(10**5);
		}
		if ($base && chance(20))
		{
			$limit{count_denied} = !$limit{count_denied} if $limit{algorithm} =~ /window|log/;
			$limit{ban} = 0 if chance(30);
		}
		my $limit = limit(%limit);

		# All units must be free again within a hundred years.
		return $limit
		  if $limit{algorithm} eq 'throttle'
		  ? $limit->{interval_ns} > 0 && $limit->{capacity} <= 10 * MAX_PERIOD * 1000 / $limit->{interval_ns}
		  : $limit{algorithm} ne 'token_bucket'
		  || ($limit->{capacity} / $limit->{count} + 1) * $limit->{period} <= 10 * MAX_PERIOD;
	}
}

# Returns a name for the limit's state of a key.
sub state_name
{
	my ($key, $limit) = @_;
	return join ' ', $key, @$limit{qw(algorithm period step from_first calendar shadow)};
}

# Returns a decision as text.
sub decision_text
{
	return defined $_[0] ? join ', ', map { defined $_ ? $_ : 'NULL' } @{ $_[0] }[ 0 .. 5 ] : 'none';
}

# Returns the first column in which a decision of SQL, from this store, differs from
# one of C, or undef.
sub decision_difference
{
	my ($got, $want, $store) = @_;

	return 'the row is missing' unless $got;
	return 'allowed' if $got->[0] != $want->[0];
	return undef if @$got == 1;
	return 'capacity' if $got->[1] != $want->[1];
	return 'remaining' if $got->[2] != $want->[2];
	foreach my $column (3, 4)
	{
		my ($g, $w) = ($got->[$column], $want->[$column]);

		# The server divides microseconds to get seconds.
		return ('retry_after', 'reset_after')[ $column - 3 ] if defined $g != defined $w || (defined $g && $g != $w / 1e6);
	}
	return 'source' if $got->[5] ne ($want->[5] eq 'local' ? $store : $want->[5]);
	return undef;
}

# Returns the decision of the binding limit of one or more limits, as docs/reference.md
# describes it.  Shadow limits matter only if there are no others.  Each decision has its wait.
sub binding_decision
{
	my ($limits, @each) = @_;
	my @in_force = grep { !$limits->[$_]{shadow} } 0 .. $#each;
	my $best;

	@each = @each[@in_force] if @in_force;
	if (!grep { !$_->[0] || $_->[5] eq 'shadow' } @each)
	{
		foreach my $d (@each)
		{
			$best = $d if !$best || $d->[2] < $best->[2];
		}
		return $best;
	}
	my $wait = sub { return $_[0][6] == -1 ? 9e18 : $_[0][6] };
	foreach my $d (@each)
	{
		$best = $d if !$best || $wait->($d) > $wait->($best)
		  || ($wait->($d) == $wait->($best) && !$d->[0] && $best->[0]);
	}
	return $best;
}

# Returns the difference between SQL's answer to a step, from this store, and the wanted
# answer, or undef.
sub answer_difference
{
	my ($step, $want, $got, $store) = @_;
	my $form = $step->{form};

	return keys %$got ? 'an answer to a step that decides nothing' : undef unless $want;
	my @rows = $step->{parts} ? (0 .. $#$want) : $form eq 'each' || $form eq 'peek' ? (1 .. $#$want) : (0);
	return 'the number of rows' if keys %$got != @rows;
	foreach my $n (@rows)
	{
		my $how = decision_difference($form eq 'allow' ? [ $got->{$n}[0] ] : $got->{$n}, $want->[$n], $store);

		return "row $n: $how" if defined $how;
	}
	return undef;
}

#
# C
#

# Compiles a C program with the extension's options, from files of this source tree,
# and names it after the first file; returns its path.  In script/test, the first test that
# needs the program compiles it for all.
sub c_program
{
	my ($node, @sources) = @_;
	my ($name) = $sources[0] =~ /(\w+)\.c$/;
	my $root = "$FindBin::RealBin/../..";
	my $made = ($ENV{RATELIMIT_TEMPLATE} || PostgreSQL::Test::Utils::tempdir . '/program') . '-'
	  . sha1_hex(map { slurp_file($_) } (map { "$root/$_" } @sources), sort glob "$root/src/*.h $root/src/*/*.h $root/test/*.h");
	my $program = "$made/$name";
	my %flags;

	open my $lock, '>>', "$made.lock" or die "$made.lock: $!";
	flock $lock, LOCK_EX or die "$made.lock: $!";
	return $program if -x $program;
	mkdir $made or -d $made or die "$made: $!";

	foreach my $name (qw(cc cppflags cflags includedir-server))
	{
		$flags{$name} = $node->config_data("--$name");
	}
	my @command = ($flags{cc}, split(' ', "$flags{cppflags} $flags{cflags}"),
		# A time_t of 64 bits on machines with 32, too.
		qw(-D_TIME_BITS=64 -D_FILE_OFFSET_BITS=64), "-I$root/src",
		"-I$flags{'includedir-server'}", '-o', "$program.new", map { "$root/$_" } @sources);
	my $output = '';
	IPC::Run::run(\@command, '>', \$output, '2>&1') or die "@command\n$output";
	rename "$program.new", $program or die "$program: $!";
	return $program;
}

# Starts the engine.
sub c_engine
{
	my ($node) = @_;
	my $program = c_program($node, 'test/engine.c', 'src/decision.c', map { "src/algorithm/$_.c" } qw(log algorithm gcra token_bucket fixed_window sliding));

	my $pid = open2(my $from, my $to, $program);
	return { pid => $pid, from => $from, to => $to, takes => {}, grants => {} };
}

my %op = (check => 'take', each => 'take', single => 'take', allow => 'take', wait => 'quiet');

# Sends an act to the engine; returns its line.
sub c_act
{
	my ($engine, $op, $step, $argument, @limits) = @_;

	print { $engine->{to} } join(' ', $op, $step->{key}, $step->{now}, $argument, $op eq 'all' ? 0 : scalar @limits,
		map { $_->{numbers} } @limits), "\n";
	$engine->{to}->flush;
	my $line = readline $engine->{from};
	die "the engine ended at: $op $step->{key} $step->{now}" unless defined $line;
	return $line;
}

# Keeps the charges of a key, as the engine counts them for a refund.
sub note_charges
{
	my ($engine, $grants, $part) = @_;

	foreach my $i ($part->{argument} ? 0 .. $#{ $part->{limits} } : ())
	{
		my $state = state_name($part->{key}, $part->{limits}[$i]);
		my $take = ++$engine->{takes}{$state};

		push @$grants, [ $part->{limits}[$i], $state, $take, $part->{key} ]
		  if $part->{refunds} && $part->{refunds}[$i] || $part->{limits}[$i]{algorithm} eq 'concurrent';
	}
	return;
}

# Takes one step; returns the answer, or undef for a step that decides nothing.
sub c_step
{
	my ($engine, $step) = @_;
	my $limits = $step->{limits} || [];
	my $parts = $step->{parts};
	my $group = $step->{group} // $step->{key};
	my $grants = $engine->{grants}{$group} ||= [];
	my $before = $engine->{now}{$group};

	$engine->{now}{$group} = $step->{now};
	if ($step->{form} =~ /^(begin|abort)$/)
	{
		# The transaction before "begin" commits at the time of its last step.
		my $now = $1 eq 'abort' ? $step->{now} : $before;

		foreach my $grant (reverse grep { $step->{form} eq 'abort' || $_->[0]{algorithm} eq 'concurrent' } @$grants)
		{
			my ($limit, $state, $take, $key) = @$grant;

			c_act($engine, 'undo', { now => $now, key => $key }, $engine->{takes}{$state} - $take, $limit);
		}
		@$grants = ();
		return undef;
	}
	if ($step->{form} eq 'reset')
	{
		my %reset = map { state_name($step->{key}, $_) => 1 } @$limits;

		@$grants = grep { $_->[3] ne $step->{key} || (%reset && !$reset{ $_->[1] }) } @$grants;
	}
	my $line = $parts ? c_act($engine, 'all', $step, scalar @$parts, map { {
				numbers => join ' ', @$_{qw(key argument)}, scalar @{ $_->{limits} }, map { $_->{numbers} } @{ $_->{limits} } } } @$parts)
	  : c_act($engine, $op{ $step->{form} } || $step->{form}, $step, $step->{argument} || 0, @$limits);
	return undef if $line eq "done\n";
	my @words = split ' ', $line;
	die "the engine says: $line" unless @words == 6 * ($parts ? @$parts : @$limits + 1);

	my @answer;
	while (@words)
	{
		my @decision = splice @words, 0, 6;

		$decision[6] = $decision[3];
		$decision[3] = undef if $decision[0] || $decision[3] == -1;
		push @answer, \@decision;
	}
	if ($parts)
	{
		note_charges($engine, $grants, $_) foreach (grep { !$_->[0] } @answer) ? () : @$parts;
	}
	elsif ($answer[0][0] && $op{ $step->{form} })
	{
		note_charges($engine, $grants, $step);
	}
	return \@answer;
}

#
# Redis
#

# Makes the tables and functions that redis_steps uses.
sub redis_engine
{
	my ($node) = @_;

	$node->safe_psql('postgres', q{
		CREATE TABLE step (id int, part int, form text, key text, now text,
			argument bigint, limits rl_limits, algorithm text, capacity bigint, count bigint,
			period float8, step float8, keys text[], all_limits rl_limits[], quotas bigint[], PRIMARY KEY (part, id));
		CREATE TABLE answer (id int, n int, allowed boolean, capacity bigint, remaining bigint,
			retry_after float8, reset_after float8, source text);
		CREATE FUNCTION take_step(s step) RETURNS SETOF answer LANGUAGE plpgsql AS $$
		DECLARE
			d rl_decision;
		BEGIN
			CASE s.form
				WHEN 'each' THEN
					RETURN QUERY
						SELECT s.id, e.ordinality::int, e.allowed, e.capacity, e.remaining, e.retry_after, e.reset_after, e.source
						FROM rl_check_each(s.key, s.limits, s.argument) WITH ORDINALITY e;
					RETURN;
				WHEN 'peek' THEN
					RETURN QUERY
						SELECT s.id, p.ordinality::int, p.allowed, p.capacity, p.remaining, p.retry_after, p.reset_after, p.source
						FROM rl_peek(s.key, s.limits, s.argument) WITH ORDINALITY p;
					RETURN;
				WHEN 'all' THEN
					RETURN QUERY
						SELECT s.id, a.ordinality::int - 1, a.allowed, a.capacity, a.remaining, a.retry_after, a.reset_after, a.source
						FROM rl_check_all(s.keys, s.all_limits, s.quotas) WITH ORDINALITY a;
					RETURN;
				WHEN 'check' THEN
					d := rl_check(s.key, s.limits, s.argument);
				WHEN 'single' THEN
					CASE s.algorithm
						WHEN 'throttle' THEN d := rl_throttle(s.key, s.capacity, s.count, s.period, s.argument);
						WHEN 'token_bucket' THEN d := rl_token_bucket(s.key, s.capacity, s.count, s.period, s.argument);
						WHEN 'fixed_window' THEN d := rl_fixed_window(s.key, s.capacity, s.period, s.argument);
						WHEN 'sliding_window' THEN d := rl_sliding_window(s.key, s.capacity, s.period, s.step, s.argument);
						WHEN 'sliding_log' THEN d := rl_sliding_log(s.key, s.capacity, s.period, s.argument);
					END CASE;
				WHEN 'wait' THEN
					d := rl_wait(s.key, s.limits, s.argument);
				WHEN 'allow' THEN
					d.allowed := rl_allow(s.key, s.limits, s.argument);
				WHEN 'refund' THEN
					PERFORM rl_refund(s.key, s.limits, s.argument);
					RETURN;
				WHEN 'ban' THEN
					PERFORM rl_ban(s.key, s.argument / 1e6::float8);
					RETURN;
				WHEN 'unban' THEN
					PERFORM rl_unban(s.key);
					RETURN;
				WHEN 'reset' THEN
					IF s.limits IS NULL THEN
						PERFORM rl_reset(s.key);
					ELSE
						PERFORM rl_reset(s.key, s.limits);
					END IF;
					RETURN;
				WHEN 'begin' THEN
					RETURN;
			END CASE;
			RETURN NEXT (s.id, 0, d.allowed, d.capacity, d.remaining, d.retry_after, d.reset_after, d.source);
		END $$;
		-- A part is a subtransaction, which its last step may roll back.  The tables are
		-- temporary, with the names of the tables above.
		CREATE PROCEDURE take_steps() LANGUAGE plpgsql AS $$
		DECLARE
			p int;
			s public.step;
			answers public.answer[];
		BEGIN
			FOR p IN SELECT part FROM step GROUP BY part ORDER BY part LOOP
				answers := '{}';
				BEGIN
					FOR s IN SELECT * FROM step WHERE part = p ORDER BY id LOOP
						PERFORM set_config('ratelimit.debug_now', s.now, true);
						IF s.form = 'abort' THEN
							RAISE 'abort';
						END IF;
						answers := answers || ARRAY(SELECT t FROM take_step(s) t);
					END LOOP;
				EXCEPTION WHEN raise_exception THEN
					-- The next command sends the refunds.
					PERFORM set_config('ratelimit.debug_now', s.now, true);
					PERFORM rl_peek(s.key, s.limits, 0);
				END;
				INSERT INTO answer SELECT * FROM unnest(answers);
				COMMIT;
			END LOOP;
		END $$;
	});
	return;
}

# Returns the text of limits, with refund_on_abort where it is wanted.
sub refundable_text
{
	my ($limits, $refunds) = @_;

	return join ', ', map { $limits->[$_]{text} . ($refunds && $refunds->[$_] ? ' refund_on_abort' : '') } 0 .. $#$limits;
}

sub step_line
{
	my ($id, $part, $step) = @_;
	my $text = refundable_text($step->{limits} || [], $step->{refunds});
	my @single = ('\N') x 5;
	my @all = ('\N') x 3;

	if ($step->{form} eq 'single')
	{
		my $limit = $step->{limits}[0];

		@single = (@$limit{qw(algorithm capacity count)}, map { $_ / 1e6 } @$limit{qw(period step)});
	}
	if (my $parts = $step->{parts})
	{
		@all = map { '{' . join(',', @$_) . '}' } [ map { qq{"$_->{key}"} } @$parts ],
		  [ map { '"' . refundable_text($_->{limits}, $_->{refunds}) . '"' } @$parts ], [ map { $_->{argument} } @$parts ];
	}
	return join("\t", $id, $part, @$step{qw(form key now)}, $step->{argument} || 0,
		length $text ? $text : '\N', @single, @all) . "\n";
}

# Takes the steps in order, on keys that no earlier call has used.  Returns for each
# step the decisions of SQL: a hash from 0 (combined), 1, 2, ... to the decision, with
# durations in seconds.  A decision of rl_allow has only its first element.
sub redis_steps { return redis_answers(redis_begin(@_)); }

# The same in two halves, between which a test can do other work, or begin other
# steps.
my $prefixes = 0;

sub redis_begin
{
	my ($node, @steps) = @_;
	my $dir = PostgreSQL::Test::Utils::tempdir;
	my ($id, $part, $key, $aborted) = (0, 0, '', 0);

	open my $out, '>', "$dir/steps" or die "$dir/steps: $!";
	foreach my $step (@steps)
	{
		my $group = $step->{group} // $step->{key};

		$part++ if $aborted || $step->{form} eq 'begin' || $group ne $key;
		print $out step_line($id++, $part, $step);
		($key, $aborted) = ($group, $step->{form} eq 'abort');
	}
	close $out or die "$dir/steps: $!";
	$prefixes++;
	append_to_file("$dir/script", qq{
		SET ratelimit.key_prefix = 'rl$prefixes:';
		SET ratelimit.command_timeout = '60s';
		CREATE TEMP TABLE step (LIKE step INCLUDING ALL);
		CREATE TEMP TABLE answer (LIKE answer);
		\\copy step FROM '$dir/steps'
		CALL take_steps();
		\\copy (SELECT * FROM answer) TO '$dir/answers'
	});
	my %begun = (dir => $dir, steps => $id, output => '');
	$begun{run} = IPC::Run::start([ $node->installed_command('psql'), '-XAtq', '-v', 'ON_ERROR_STOP=1',
			'-d', $node->connstr('postgres'), '-f', "$dir/script" ], '<', \'', '>', \$begun{output}, '2>&1');
	return \%begun;
}

sub redis_answers
{
	my ($begun) = @_;
	my $dir = $begun->{dir};
	my @answers = map { {} } 1 .. $begun->{steps};

	$begun->{run}->finish or die "the steps failed: $begun->{output}";
	open my $in, '<', "$dir/answers" or die "$dir/answers: $!";
	while (my $line = <$in>)
	{
		chomp $line;
		my ($step, $n, @decision) = map { $_ eq '\N' ? undef : $_ } split /\t/, $line;

		$decision[0] = $decision[0] eq 't' ? 1 : 0;
		$answers[$step]{$n} = \@decision;
	}
	close $in;
	unlink "$dir/steps", "$dir/script", "$dir/answers";
	return \@answers;
}

1;
