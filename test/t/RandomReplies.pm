# Random calls, right replies to them, wrong replies, and the meaning that a reply
# has.
#
# A call is a hash: form, limits (as Engines makes them), quota.  Its reply has
# one of four shapes: "throttle" answers a single throttle, "units" any other single limit
# without options, "check" any other decision and quota 0, "count" a call that decides nothing.
package RandomReplies;

use strict;
use warnings FATAL => 'all';

use Engines;
use Exporter 'import';
use List::Util qw(max min);

our @EXPORT = qw(random_call right_reply wrong_reply is_complete meaning problems);

my @algorithms = qw(throttle token_bucket fixed_window sliding_window sliding_log);
my @periods = (1, 1_000, 1_000_000, 60_000_000, 86_400_000_000, MAX_PERIOD);

# The longest wait that is returned, in microseconds.
use constant MAX_WAIT => 20 * MAX_PERIOD;

#
# Calls
#

sub random_limits
{
	my ($n) = @_;
	my @tags;

	# The last is a limit in force, if no other is: shadow limits alone allow the action
	# also if Redis fails.
	while (@tags < $n)
	{
		my $tag = Engines::random_tag(pick(@algorithms), pick(@periods));

		push @tags, $tag unless (grep { Engines::same_tag($_, $tag) } @tags) || ($tag->{shadow} && @tags == $n - 1 && !grep { !$_->{shadow} } @tags);
	}
	return [ map { random_limit($_) } @tags ];
}

our @pool;

sub random_call
{
	@pool = map { random_limits(chance(60) ? 1 : 2 + below(7)) } 1 .. 400 unless @pool;

	my $limits = pick(@pool);
	my $capacity = pick(@$limits)->{capacity};
	my %call = (limits => $limits,
		quota => chance(50) ? 1 : chance(15) ? 0 : chance(80) ? 1 + below($capacity) : $capacity + 1,
		form => pick(qw(check check check each peek allow wait refund reset reset_limits ban unban)));

	if (chance(20))
	{
		$call{form} = 'throttle';
		$call{limits} = [ limit(algorithm => 'throttle', capacity => log_uniform(1000), count => log_uniform(1000), period => pick(@periods[ 1 .. 4 ])) ];
	}
	$call{shape} = $call{form} =~ /ban|reset|refund/ ? 'count'
	  : @{ $call{limits} } > 1 || $call{form} eq 'peek' || $call{quota} == 0 || (grep { $call{limits}[0]{$_} } qw(ban count_denied calendar)) ? 'check'
	  : $call{limits}[0]{algorithm} eq 'throttle' ? 'throttle' : 'units';
	return \%call;
}

#
# Right replies
#

# Returns a throttle's longest backlog that leaves room for the quota, in nanoseconds.
sub room
{
	my ($limit, $quota) = @_;
	use integer;

	return ($limit->{capacity} - $quota) * $limit->{interval_ns};
}

# Returns a number from 0 to n, often 0 or n.
sub up_to { my ($n) = @_; return chance(20) ? 0 : chance(20) ? $n : below($n + 1); }

# Returns true if a refusal of the call counts.
sub counts_denied
{
	my ($call, $limit) = @_;

	return $limit->{count_denied} && $call->{form} ne 'wait' && $call->{quota} > 0 && $call->{quota} <= $limit->{capacity};
}

# Returns the numbers of one limit that allows the quota or not, for this verdict of
# all limits.  A shadow limit that does not allow an allowed action acts as if it were
# refused.
sub figures
{
	my ($call, $limit, $allow, $verdict) = @_;
	my ($quota, $capacity) = ($call->{quota}, $limit->{capacity});
	my $possible = $quota <= $capacity;

	if ($limit->{algorithm} eq 'throttle')
	{
		my $room = $possible ? room($limit, $quota) : 0;

		return $allow ? up_to($room) : $room + 1 + up_to(room($limit, 0) - $room);
	}
	$verdict = 'refused' if $verdict eq 'allowed' && !$allow;
	my $used = $allow ? up_to($capacity - $quota)
	  : $possible ? $capacity - $quota + 1 + up_to($quota) : up_to($capacity);
	$used += $quota if $verdict eq 'allowed' || $verdict eq 'refused' && counts_denied($call, $limit);
	return ($allow ? 1 : 0, $used,
		$verdict ne 'allowed' && $possible && $used + $quota > $capacity ? 1 + below($limit->{period}) : 0,
		$used > 0 ? 1 + below(MAX_PERIOD) : 0);
}

# Returns the numbers of a right reply.
sub right_numbers
{
	my ($call) = @_;
	my ($limits, $quota) = @$call{qw(limits quota)};

	return $call->{form} =~ /^(?:ban|refund)$/ ? 1 : below(2) if $call->{shape} eq 'count';

	my @in_force = grep { !$limits->[$_]{shadow} } 0 .. $#$limits;
	my $impossible = grep { $quota > $limits->[$_]{capacity} } @in_force;
	my $allowed = !$impossible && chance(50);
	my $ban = chance(10) ? 1 + below(MAX_PERIOD) : 0;
	my $refuses = pick(@in_force);
	my @figures = map {
		my $limit = $limits->[$_];
		my $allows = $limit->{shadow} ? chance(50) : $allowed || ($_ != $refuses || $impossible) && chance(50);

		figures($call, $limit, $quota <= $limit->{capacity} && $allows,
			$ban ? 'banned' : $allowed ? 'allowed' : 'refused')
	} 0 .. $#$limits;

	# The limit that set the ban may be known.
	my @rule = $ban && chance(50) ? 'limit ' . limits_text(pick(@$limits)) : ();

	if ($call->{shape} eq 'throttle')
	{
		return ($ban, @figures, @rule) if $ban;
		return $allowed ? $figures[0] : -$figures[0];
	}
	if ($call->{shape} eq 'units' && !($limits->[0]{algorithm} eq 'sliding_log' && chance(20)))
	{
		my (undef, $used, $wait, $reset) = @figures;

		return ($used, $reset, $ban ? ($wait, $ban, @rule) : $allowed ? () : $wait);
	}
	my $brought = !$allowed && !$impossible && $quota > 0 && $limits->[$refuses]{ban}
	  && $call->{form} ne 'wait' && chance(30) ? 1 + below(MAX_PERIOD) : 0;
	return ($ban || ($allowed ? 0 : -1), $ban ? 0 : $brought, 1 + below(4 * 10**15), @figures, @rule);
}

sub encode_number
{
	my ($number) = @_;
	return chance(70) && $number !~ /^limit/ ? ":$number\r\n" : '$' . length($number) . "\r\n$number\r\n";
}

sub encode
{
	my ($call, @numbers) = @_;
	my $array = $call->{shape} =~ /check|units/ || @numbers != 1;

	return ($array ? '*' . @numbers . "\r\n" : '') . join '', map { encode_number($_) } @numbers;
}

sub right_reply { my ($call) = @_; return encode($call, right_numbers($call)); }

#
# Wrong replies
#

my @odd_numbers = (qw(-1 0 1 2 7 -7 2147483647 2147483648 4294967296 4294967297 1000000000000000 1000000000000001
	9007199254740992 9007199254740993 1000000000000000000 9223372036854775807 -9223372036854775807 -9223372036854775808
	9223372036854775808 -9223372036854775809 18446744073709551616 99999999999999999999
	000 -0 00000000000000000007 - -- 1- 1.5 1e5 0x10 nan inf), '', ' 1', '1 ', "1\0");
my @lengths = (qw(-1 -2 -5 0 1 2 5 34 35 36 1000 65535 65536 2147483647 2147483648 4294967295 4294967296 4294967297 4294967299
	9999999999 4611686018427387904 9223372036854775807 9223372036854775808 18446744073709551615 18446744073709551617
	-9223372036854775808 99999999999999999999 01 1x x - +1), '', ' 1');
my @others = ("+OK\r\n", "-ERR\r\n", "\$-1\r\n", "*-1\r\n", "*0\r\n", "\$0\r\n\r\n", "\$5\r\nhello\r\n", "*1\r\n:1\r\n", "*1\r\n*1\r\n:1\r\n",
	"+\r\n", "-\r\n", ":\r\n", "\r\n", "\n", "\0",
	# RESP3
	"_\r\n", "#t\r\n", "#f\r\n", ",1.5\r\n", ",inf\r\n", ",1\r\n", "(1\r\n", "(99999999999999999999\r\n", "%1\r\n:1\r\n:1\r\n",
	"~1\r\n:1\r\n", ">1\r\n:1\r\n", ">2\r\n+push\r\n:1\r\n", "=5\r\ntxt:1\r\n", "!5\r\nERR x\r\n", "|1\r\n+a\r\n:1\r\n:1\r\n",
	"\$?\r\n;1\r\n1\r\n;0\r\n", "*?\r\n:1\r\n.\r\n", ".\r\n");
my @errors = ('LOADING Redis is loading', 'BUSY Redis is busy', 'READONLY You can\'t write', 'OOM command not allowed', 'MISCONF Redis',
	'CLUSTERDOWN The cluster is down', 'MOVED 1 127.0.0.1:1', 'ASK 1 127.0.0.1:1', 'NOPERM', 'WRONGTYPE', 'ERR',
	'NOSCRIPT No matching script', 'NOWINDOW 1700000000000000', 'NOWINDOW x', 'NOAUTH Authentication required.', 'ERR max number of clients reached', 'WRONGPASS', 'ERR DB index');

sub random_bytes { my ($n) = @_; return join '', map { chr below(256) } 1 .. $n; }

# Returns the reply with a few bytes changed.
sub shake
{
	my ($reply) = @_;

	foreach (1 .. 1 + below(3))
	{
		my $at = below(length($reply) + 1);
		my $byte = chance(50) ? pick(split(//, "\r\n:\$*+-0123456789"), "\r\n") : chr below(256);

		substr $reply, $at, below(3), chance(70) ? $byte : '' if $at < length $reply;
		$reply = substr($reply, 0, $at) . $byte . substr($reply, $at) if chance(30);
	}
	return $reply;
}

# Returns the elements of a right reply, as text.
sub elements { my ($reply) = @_; return $reply =~ /([:\$][^:\$*]+)/g; }

# Functions that return a wrong reply, by name.
my %wrong = (
	cut => sub { my ($call, $right) = @_; return substr $right, 0, below(length $right) },
	shaken => sub { my ($call, $right) = @_; return shake($right) },
	number => sub {
		my ($call) = @_;
		my @numbers = right_numbers($call);

		$numbers[ below(scalar @numbers) ] = pick(@odd_numbers) foreach 1 .. 1 + below(2);
		return encode($call, @numbers);
	},
	count => sub {
		my ($call) = @_;
		my @numbers = right_numbers($call);

		splice @numbers, below(scalar @numbers), below(2), map { pick(@odd_numbers[ 0 .. 5 ]) } 1 .. below(3);
		return encode($call, @numbers);
	},
	another => sub { return right_reply(random_call()) },
	length => sub {
		my ($call, $right) = @_;
		my $n = pick(@lengths);

		$right =~ s/([*\$])\d+/$1$n/;
		return $right;
	},
	'any length' => sub {
		my ($call, $right) = @_;
		my $n = pick(@lengths);

		return pick('$', '*', '%', '~', '>', '=', '|') . "$n\r\n" . pick('', $right, random_bytes(below(50)));
	},
	type => sub {
		my ($call, $right) = @_;
		my @elements = elements($right);

		$elements[ below(scalar @elements) ] = pick(@others);
		return ($right =~ /^\*/ ? '*' . @elements . "\r\n" : '') . join '', @elements;
	},
	'other type' => sub { return pick(@others) },
	nested => sub {
		my ($call, $right) = @_;

		return "*1\r\n" x (1 + below(chance(20) ? 3000 : 12)) . $right;
	},
	error => sub {
		my $error = pick(@errors) . (chance(30) ? ' ' . random_bytes(below(chance(10) ? 5000 : 30)) : '');

		$error =~ s/[\r\n]/?/g;
		return "-$error\r\n";
	},
	status => sub { return '+' . pick('OK', 'QUEUED', '1', '0', '', 'x' x below(5000)) . "\r\n" },
	two => sub {
		my ($call, $right) = @_;

		return $right . pick($right, $right, ":0\r\n", "\r\n", "\0", random_bytes(1 + below(20)));
	},
	before => sub {
		my ($call, $right) = @_;

		return pick(":0\r\n", "+OK\r\n", "\r\n", ' ', ">1\r\n:1\r\n", "|1\r\n+a\r\n+b\r\n", random_bytes(1 + below(20))) . $right;
	},
	garbage => sub { return random_bytes(below(300)) },
	'no Redis' => sub { return pick("HTTP/1.1 400 Bad Request\r\n\r\n", "220 mail ESMTP\r\n", "\x15\x03\x01\x00\x02\x02\x28", "SSH-2.0-x\r\n") },
	nothing => sub { return '' },
	long => sub {
		my ($call, $right) = @_;

		return pick(':' . '1' x 70_000, '$70000' . "\r\n" . '1' x 70_000 . "\r\n", "*9000\r\n" . ":1234567\r\n" x 9_000, '-' . 'E' x 70_000 . "\r\n", '*' . '0' x 70_000);
	});

# Returns the name of an error and a reply with it, which may still be right.
sub wrong_reply
{
	my ($call, $right) = @_;
	my $name = pick(('number') x 5, ('cut') x 3, ('shaken') x 4, ('type') x 3, 'length', (grep { $_ ne 'long' } sort keys %wrong), chance(5) ? 'long' : ());

	return ($name, $wrong{$name}->($call, $right));
}

# Returns true if the reply is complete, by the rules of RESP2.
sub is_complete
{
	my ($reply) = @_;

	for (my $due = 1; $due > 0; $due--)
	{
		return 0 unless $reply =~ /\G([-+:\$*])(.*?)\r\n/gcs;
		my ($type, $rest) = ($1, $2);
		next if $type =~ /[-+:]/ || $rest eq '-1';
		return 0 if $rest !~ /^(?:0|[1-9]\d{0,5})\z/;
		if ($type eq '*')
		{
			$due += $rest;
			next;
		}
		return 0 if pos($reply) + $rest + 2 > length $reply;
		pos($reply) += $rest + 2;
	}
	return 1;
}

#
# The meaning of a reply
#

sub is_int64
{
	my ($sign, $digits) = $_[0] =~ /^(-?)0*(\d+)\z/ or return 0;

	return length $digits < 19 || length $digits == 19 && $digits le ($sign ? '9223372036854775808' : '9223372036854775807');
}

# Returns whether a reply is an array, whether it ends with a limit, and its numbers, or
# nothing if it has other elements.  Any two bytes can end a string, because hiredis skips them.
sub numbers
{
	my ($reply) = @_;
	my ($array, $n) = $reply =~ /\G(\*)(0|[1-9]\d{0,3})\r\n/gc ? (1, $2) : (0, 1);
	my $rule = 0;
	my @numbers;

	foreach (1 .. $n)
	{
		if ($array && $_ == $n && $n > 1 && $reply =~ /\G\$([1-9]\d?|1\d\d)\r\n(?=limit )/gc
			&& $1 > 6 && substr($reply, pos $reply) =~ /^limit [ -~]{@{[ $1 - 6 ]}}..\z/s)
		{
			($rule, pos $reply) = (1, length $reply);
			next;
		}
		if ($reply =~ /\G:(0|-?[1-9]\d{0,18})\r\n/gc)
		{
			push @numbers, $1;
		}
		else
		{
			return unless $reply =~ /\G\$([1-9]|1\d|20)\r\n/gc && pos($reply) + $1 + 2 <= length $reply;
			push @numbers, substr $reply, pos $reply, $1;
			pos($reply) += $1 + 2;
		}
		return unless is_int64($numbers[-1]);
		$numbers[-1] = 0 + $numbers[-1];
	}
	return unless (pos $reply || 0) == length $reply;
	return ($array, $rule, @numbers);
}

# Returns the meaning of a reply: "right" is a decision, "wrong" is no decision, and
# "odd" has the form of a right reply but numbers that no script sends.  For a right
# reply, also returns the verdict: allowed, refused or banned.  Numbers may be too
# large, because clocks and limits' numbers can change.
sub meaning
{
	my ($call, $reply) = @_;
	my ($array, $rule, @numbers) = numbers($reply) or return 'wrong';

	return 'wrong' if $array != ($call->{shape} =~ /check|units/ || $call->{shape} eq 'throttle' && @numbers == 2);
	my ($meaning, $verdict) = $call->{shape} eq 'count' ? count_meaning($call, @numbers)
	  : $call->{shape} eq 'throttle' ? throttle_meaning($call, @numbers)
	  : $call->{shape} eq 'units' ? units_meaning($call, @numbers) : check_meaning($call, @numbers);
	return 'wrong' if $rule && ($verdict // '') ne 'banned' && $meaning ne 'odd';
	return ($meaning, $verdict);
}

sub count_meaning
{
	my ($call, $n) = @_;

	return $n < 0 || $call->{form} =~ /^(?:ban|refund)$/ && $n != 1 ? 'odd' : 'right';
}

sub throttle_meaning
{
	my ($call, @numbers) = @_;
	my $limit = $call->{limits}[0];
	my $possible = $call->{quota} <= $limit->{capacity};

	return 'wrong' if @numbers > 2;
	if (@numbers == 2)
	{
		return $numbers[1] < 0 ? 'wrong' : $numbers[0] > 0 ? ('right', 'banned') : 'odd';
	}

	# The least number has no opposite.
	my $backlog = $numbers[0] < 0 ? -max($numbers[0], -9223372036854775807) : $numbers[0];
	my $verdict = $possible && $backlog <= room($limit, $call->{quota}) ? 'allowed' : 'refused';
	return ('right', $verdict) if !$possible;
	return ($numbers[0] < 0) == ($verdict eq 'refused') ? ('right', $verdict) : 'wrong';
}

sub units_meaning
{
	my ($call, @numbers) = @_;
	my ($used, $reset, $wait, $ban) = @numbers;
	my $limit = $call->{limits}[0];

	return check_meaning($call, @numbers) if @numbers > 4 && $limit->{algorithm} eq 'sliding_log';
	return 'wrong' if @numbers < 2 || @numbers > 4;
	return 'odd' if @numbers == 4 && $ban <= 0;
	my $fits = $call->{quota} <= $limit->{capacity} && $used <= $limit->{capacity} - $call->{quota};
	return check_meaning($call, @numbers == 2 ? (0, 0, 1, 1) : @numbers == 3 ? (-1, 0, 1, 0) : ($ban, 0, 1, $fits ? 1 : 0), $used, $wait || 0, $reset);
}

sub check_meaning
{
	my ($call, @numbers) = @_;
	my ($limits, $quota) = @$call{qw(limits quota)};

	return 'wrong' if @numbers < 3 || @numbers != 3 + @$limits + 3 * grep { $_->{algorithm} ne 'throttle' } @$limits;
	my ($verdict, $brought, $time, @figures) = @numbers;
	# No time is after the year 9999.
	return 'wrong' if $time >= 253_402_300_800_000_000 || grep { $_ < 0 } $brought, $time, @figures;
	my $odd = $verdict < -1 || $brought && ($verdict != -1 || $call->{form} eq 'wait' || !grep { $_->{ban} } @$limits);
	my $refused = 0;
	foreach my $limit (@$limits)
	{
		my $possible = $quota <= $limit->{capacity};

		if ($limit->{algorithm} eq 'throttle')
		{
			my $backlog = shift @figures;

			$refused++ if !$limit->{shadow} && (!$possible || $backlog > room($limit, $quota));
			next;
		}
		my ($allowed, $used, $wait, $reset) = splice @figures, 0, 4;
		my $lacks = $used > $limit->{capacity} - $quota;
		my $happens = $verdict == 0 && !($limit->{shadow} && $allowed == 0);
		my $denied = ($verdict == -1 || $verdict == 0 && !$happens) && counts_denied($call, $limit);

		$refused++ if $allowed != 1 && !$limit->{shadow};
		$odd ||= $allowed > 1 || $allowed && !$possible || ($used > 0) != ($reset > 0) || $used > 2 * 10**15
		  || ($happens ? $used < $quota || $used > $limit->{capacity} || $wait
			: ($wait > 0) != ($possible && $lacks)
			|| ($denied ? $used < $quota || ($allowed ? $used > $limit->{capacity} : $used < $limit->{capacity})
				: $allowed == $lacks));
	}
	return 'wrong' if $verdict <= 0 && ($refused > 0) != ($verdict < 0);
	return $odd ? 'odd' : ('right', $verdict == 0 ? 'allowed' : $verdict < 0 ? 'refused' : 'banned');
}

# Returns the errors in the decisions of a call.
sub problems
{
	my ($call, @decisions) = @_;
	my @limits = @{ $call->{limits} };
	my $quota = $call->{quota};
	my $each = $call->{form} =~ /^(?:each|peek)$/;
	my @problems;

	push @problems, scalar(@decisions) . ' decisions' if @decisions != ($each ? @limits : 1);
	my $whole = !grep { !$_->[0] } @decisions;
	my @in_force = grep { !$_->{shadow} } @limits;
	foreach my $n (0 .. $#decisions)
	{
		my ($allowed, $capacity, $remaining, $retry_after, $reset_after, $source) = @{ $decisions[$n] };
		my @possible = $each ? $limits[$n] : grep { $_->{capacity} == ($capacity // -1) } @in_force;
		my $helps = $each ? $quota <= $limits[$n]{capacity} : !grep { $quota > $_->{capacity} } @in_force;
		my $shadow = $each && $limits[$n]{shadow};

		# A throttle's remaining is rounded, as in redis-cell.
		my $rounds = grep { $_->{algorithm} eq 'throttle' } @possible;

		if (!defined $allowed || !defined $capacity || !@possible || !defined $remaining || !defined $reset_after)
		{
			push @problems, 'a column';
			next;
		}
		push @problems, 'remaining' if $remaining < 0 || $remaining > $capacity || $capacity != $possible[0]{capacity};
		push @problems, 'reset_after' if $reset_after < 0 || $reset_after > MAX_WAIT / 1e6;
		push @problems, 'source' unless $source eq 'redis' || $source eq 'ban' && !$allowed && $remaining == 0 || $source eq 'shadow' && $shadow;
		push @problems, 'shadow' if $shadow && (!$allowed || defined $retry_after || $source eq 'redis' && !$helps);
		if ($source eq 'shadow')
		{
			push @problems, 'shadow, remaining' if $helps && $quota > 0 && $remaining >= $quota && !$rounds;
		}
		elsif ($allowed)
		{
			push @problems, 'allowed, retry_after' if defined $retry_after;
			push @problems, 'allowed, remaining' if $whole && $remaining > $capacity - $quota && !$rounds;
			push @problems, 'allowed, reset_after' if $whole && $quota > 0 && $reset_after == 0;
		}
		else
		{
			push @problems, 'refused, retry_after' if defined $retry_after != $helps || defined $retry_after && !($retry_after > 0 && $retry_after <= MAX_WAIT / 1e6);
			push @problems, 'refused, remaining' if $helps && $quota > 0 && $remaining >= $quota && $source eq 'redis' && !$rounds;
		}
	}
	return @problems;
}

1;
