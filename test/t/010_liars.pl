# A server that is not Redis, or sends wrong replies: each call ends with an error in
# time and without a crash, and the failure policy applies.
#
# Runs twice: no real server sends the replies.
use RatelimitTest;
use LyingServer;

my ($redis, $node, $session) = start_servers(\&new_node);
my $pid = $session->pid;
my $take = q{SELECT rl_throttle('k', 7, 1, 86400)};

# Returns a server that answers each request with the same bytes, in one piece or
# singly, and may then end the connection.
sub liar
{
	my ($answer, %how) = @_;

	return LyingServer->new(sub {
		return ($how{slowly} ? map { ($_, \0.002) } split //, $answer : $answer, $how{close} ? undef : ());
	});
}

# The messages of replies that end too soon, and of replies that are no decision.
my %message = (
	'00000' => qr/^$/,
	lost => qr/^lost the connection to Redis: /,
	odd => qr/^(?:unexpected reply from Redis|Redis answered with an error): /);

foreach my $case (
	# what, bytes, error
	[ 'loading', "-LOADING Redis is loading the dataset in memory\r\n", 'odd' ],
	[ 'busy', "-BUSY Redis is busy running a script\r\n", 'odd' ],
	[ 'no quorum', "-CLUSTERDOWN The cluster is down\r\n", 'odd' ],
	[ 'no snapshot', "-MISCONF Redis is configured to save RDB snapshots\r\n", 'odd' ],
	[ 'no password', "-NOAUTH Authentication required.\r\n", 'odd' ],
	[ 'an empty error', "-\r\n", 'odd' ],
	[ 'an error of 60 kB', '-' . ('E' x 60_000) . "\r\n", 'odd' ],
	[ 'an error with control bytes', "-ERR \x01\x1b[2J\xff\r\n", 'odd' ],
	[ 'no script, always', "-NOSCRIPT No matching script\r\n", 'odd' ],
	[ 'another protocol', "HTTP/1.1 400 Bad Request\r\n\r\n", 'odd' ],
	[ 'bytes', join('', map { chr } 0 .. 255), 'odd' ],
	[ 'only an end', '', 'lost', close => 1 ],
	[ 'silence', '', 'lost' ],
	[ 'half an answer', ':12', 'lost' ],
	[ 'half an answer and an end', ':12', 'lost', close => 1 ],
	[ 'a status', "+OK\r\n", 'odd' ],
	[ 'nil', "\$-1\r\n", 'odd' ],
	[ 'a nil array', "*-1\r\n", 'odd' ],
	[ 'an empty array', "*0\r\n", 'odd' ],
	[ 'an empty string', "\$0\r\n\r\n", 'odd' ],
	[ 'text', "\$5\r\nhello\r\n", 'odd' ],
	[ 'a number and text', "\$2\r\n1x\r\n", 'odd' ],
	[ 'too long a number', "\$20\r\n99999999999999999999\r\n", 'odd' ],
	[ 'one number in an array', "*1\r\n:1\r\n", 'odd' ],
	[ 'three numbers', "*3\r\n:1\r\n:2\r\n:3\r\n", 'odd' ],
	[ 'a thousand numbers', "*1000\r\n" . (":1\r\n" x 1000), 'odd' ],
	[ 'nested arrays', "*1\r\n" x 6 . ":1\r\n", 'odd' ],
	[ 'deeply nested arrays', "*1\r\n" x 5000 . ":1\r\n", 'odd' ],
	[ 'an array of nil', "*2\r\n\$-1\r\n:1\r\n", 'odd' ],
	[ 'an array of errors', "*2\r\n-ERR\r\n-ERR\r\n", 'odd' ],
	[ 'a negative backlog', "*2\r\n:5\r\n:-5\r\n", 'odd' ],
	[ 'an allowance over the limit', ":9000000000000000000\r\n", 'odd' ],
	[ 'a refusal although nothing is used', ":-1\r\n", 'odd' ],
	[ 'the least number', ":-9223372036854775808\r\n", '00000' ],
	[ 'an endless string', "\$2000000000\r\n" . ('x' x 300_000), 'odd' ],
	[ 'a string without an end', "\$2147483647\r\n", 'lost' ],
	[ 'an array without an end', "*2147483647\r\n", 'lost' ],
	[ 'an array of too many', "*2147483647\r\n" . (":1\r\n" x 30_000), 'odd' ],
	[ 'a lying length', "\$99999999999999999999\r\nx\r\n", 'odd' ],
	[ 'a negative length', "\$-7\r\nx\r\n", 'odd' ],
	[ 'an endless line', ':' . ('1' x 300_000), 'odd' ],
	[ 'one byte at a time, without end', ':' . ('1' x 10_000), 'lost', slowly => 1 ])
{
	my ($what, $answer, $state, %how) = @$case;
	my $liar = liar($answer, %how);

	# Only replies that do not end need a short timeout.
	$session->set(redis_url => $liar->url, on_error => 'error', command_timeout => $state eq 'lost' ? '100ms' : '60s');
	my $got = $session->attempt($take);
	is($got->{state}, $state eq '00000' ? $state : 'PT504', "$what: SQLSTATE") or diag "$got->{message} $got->{answer}";
	like($got->{message}, $message{$state}, "$what: message");
	unlike("$got->{message}$got->{detail}", qr/[^ -~]/, "$what: the message is printable");
	next if $state eq '00000';
	foreach my $policy ([ allow => '(t,7,,,,,fail_open)' ], [ deny => '(f,7,,,,,fail_closed)' ])
	{
		$session->ask("SET ratelimit.on_error = $policy->[0]");
		is($session->attempt($take)->{answer}, $policy->[1], "$what: on_error = $policy->[0]");
	}

	# Such a reply is wrong for every function.  Numbers and silence are not.
	next if $state eq 'lost' || $answer =~ /^[:*]/ || $what eq 'a status';
	like($session->attempt("SELECT $_")->{state}, qr/^PT504$/, "$what: $_ raises an error")
	  foreach q{rl_peek('k', '7/1d')}, q{rl_reset('k')}, q{rl_unban('k')};
}

# A reply that comes in pieces is a valid reply.
my $slow = liar("*2\r\n\$4\r\n5000\r\n:0\r\n", slowly => 1);
$session->set(command_timeout => '60s', redis_url => $slow->url);
is($session->attempt($take)->{answer}, '(f,7,0,0.005,0.005,,ban)', 'a reply in pieces');

# The next call does not use a second reply.
my $talker = liar(":0\r\n:86400000000000\r\n:86400000000000\r\n");
$session->set(on_error => 'error', redis_url => $talker->url);
is($session->attempt($take)->{state}, 'PT504', "too many replies, call $_") foreach 1 .. 4;

# One backend made all these calls.
$session->set(redis_url => undef);
is($session->ask('SELECT pg_backend_pid()'), $pid, 'the backend is alive');
is($session->attempt($take)->{answer}, '(t,7,6,,86400,"throttle 1/1d burst 7",redis)', 'Redis decides again');

done_testing();
