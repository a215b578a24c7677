# A server that repeats what it received, sends what was not asked for, or is no master:
# errors show no argument, memory is bounded, and no replica decides.
#
# Runs twice: no real server sends the replies.
use RatelimitTest;
use LyingServer;

my ($redis, $node, $session) = start_servers(\&new_node);
my $take = q{SELECT rl_throttle('hidden key', 7, 1, 86400)};

#
# Replies that repeat arguments
#

# Returns a server that answers each command in this list by an error, and others by OK.
sub echo
{
	my ($text, @commands) = @_;

	return LyingServer->new(sub {
		my ($command, @words) = @_;
		my $reply = $text->($command, @words);

		return "+OK\r\n" unless grep { $_ eq $command } @commands;
		return "-$reply\r\n";
	});
}

my $redis7 = sub { my ($command, @words) = @_; return "ERR unknown command '$command', with args beginning with: " . join ' ', map { "'$_'" } @words };
my $redis6 = sub { my ($command, @words) = @_; return "ERR unknown command `$command`, with args beginning with: " . join ', ', map { "`$_`" } @words };
my $code = sub { return "NOPERM User limiter may not send @_" };
my $no_code = sub { return "@_[1 .. $#_] is wrong" };
my $names = sub { my ($name) = grep { /hidden/ } @_; return 'WRONGTYPE the key ' . ($name // '') . ' has another type' };

foreach my $case (
	# what, text, the commands, the message's end
	[ 'AUTH is unknown', $redis7, ['AUTH'], 'ERR' ],
	[ 'AUTH is unknown to an older server', $redis6, ['AUTH'], 'ERR' ],
	[ 'AUTH is not permitted', $code, ['AUTH'], 'NOPERM' ],
	[ 'the reply to AUTH has no code', $no_code, ['AUTH'], 'it has no code' ],
	[ 'the reply to SELECT has no code', $no_code, ['SELECT'], 'it has no code' ],
	[ 'EVALSHA is unknown', $redis7, ['EVALSHA'], "ERR unknown command 'EVALSHA'" ],
	[ 'EVALSHA is unknown to an older server', $redis6, ['EVALSHA'], 'ERR unknown command `EVALSHA`' ],
	[ 'a key in another text', $names, ['EVALSHA'], 'WRONGTYPE the key' ])
{
	my ($what, $text, $commands, $end) = @$case;
	my $liar = echo($text, @$commands);

	$session->set(redis_passfile => password_file('s3cr3t'), redis_url => $liar->url(db => 3));
	my $got = $session->fails($take, $what, 'PT504', qr/^Redis answered with an error: \Q$end\E$/);
	unlike("$got->{message} $got->{detail}", qr/s3cr3t|hidden/, "$what: neither password nor key");
	unlike($session->ask('SELECT error FROM rl_status()'), qr/s3cr3t|hidden/, "$what: rl_status()");
	$session->ask("SET ratelimit.on_error = allow; $take; RESET ratelimit.on_error");
}
is($session->error, '', 'with on_error = allow the call succeeds');
unlike(join('', grep { !/STATEMENT|CONTEXT/ } split /^/, new_log($node)), qr/s3cr3t|hidden/, 'the log has neither password nor key');

#
# Bytes while no reply is due
#

# A node of a Cluster has answered its calls, and sends 64 MB while the calls to another
# node are under way.
my $keys = 40;
my $other = LyingServer->new(do {
	my $waited = 0;
	sub { return ($waited++ ? () : \0.5, ":0\r\n") };
}, tcp => 1);
my $flood = LyingServer->new(do {
	my $asked = 0;
	sub {
		my ($command, $script, $nkeys) = @_;

		return "-CROSSSLOT Keys in request don't hash to the same slot\r\n" if $nkeys > 1;
		return ":0\r\n" if $asked++ == 0;
		return ('-MOVED 0 127.0.0.1:' . $other->port . "\r\n", $asked < $keys ? () : ('x' x 1_048_576) x 64);
	};
}, tcp => 1);

sub peak_memory { return slurp_file('/proc/' . $session->pid . '/status') =~ /^VmHWM:\s*(\d+) kB/m ? $1 : die 'no VmHWM'; }

$session->set(redis_passfile => undef, redis_url => $flood->url);
my $before = peak_memory();
my $got = $session->attempt("SELECT count(*) FILTER (WHERE source = 'redis') FROM rl_check_many(ARRAY(SELECT 'k' || i FROM generate_series(1, $keys) i), '9/1h')");
# The flood may come together with the last reply.
like("$got->{answer}$got->{message}", qr/^(?:$keys|unexpected reply from Redis: it answers no command)$/, 'a flood on a line without calls: the batch ends');
cmp_ok(peak_memory() - $before, '<', 16384, 'a flood on a line without calls needs no memory');

#
# A batch over two nodes, in a backend without a descriptor for waiting for both
#

SKIP:
{
	my $second = LyingServer->new(sub { return ":0\r\n" }, tcp => 1);
	my $first = LyingServer->new(do {
		my $asked = 0;
		sub {
			return "-CROSSSLOT Keys in request don't hash to the same slot\r\n" if $_[2] > 1;
			return $asked++ % 2 ? ":0\r\n" : '-MOVED 0 127.0.0.1:' . $second->port . "\r\n";
		};
	}, tcp => 1);
	my $batch = q{SELECT count(*) FILTER (WHERE source = 'redis') FROM rl_check_many(ARRAY(SELECT 'k' || i FROM generate_series(1, 40) i), '9/1h')};
	my $end = 0;

	skip 'prlimit is not there', 2 unless has_program('prlimit');
	# A wrong URL makes the backend close its connections.
	$session->with({ redis_url => 'redis://' }, sub { $session->attempt($batch) });
	$session->set(redis_url => $first->url);
	# Two connections need four descriptors, and waiting for both one more.
	for (my $room = 0; $room < 4 || -l '/proc/' . $session->pid . "/fd/$end"; $end++)
	{
		$room++ unless -l '/proc/' . $session->pid . "/fd/$end";
	}
	$got = $session->attempt_below($end, $batch);
	is("$got->{state} $got->{answer} $got->{message}", '00000 40 ', 'a batch over two nodes without a descriptor');
}

#
# A replica that has lost its master
#

my $master = RedisServer->new->start;
my $replica = RedisServer->new->start;
my $limit = "'fixed_window 2/1d'";

$session->set(redis_url => $master->url(tcp => 1));
$session->ask("SELECT rl_ban('banned', 3600); SELECT rl_check('full', $limit, 2)");
$replica->cli('REPLICAOF', '127.0.0.1', $master->port);
await('the replica to have the keys', sub { return $replica->cli('DBSIZE') == 2 });
$replica->cli('REPLICAOF', '127.0.0.1', 1);
$session->ask("SELECT rl_unban('banned'); SELECT rl_reset('full'); SELECT rl_check('new', $limit, 2)");

my $list = $replica->url(tcp => 1) . ',127.0.0.1:' . $master->port;
foreach my $how ([ 'a list', $list ], [ 'a list with a user', $list, 'limiter' ])
{
	my ($what, $url, $user) = @$how;

	if ($user)
	{
		$_->cli('ACL', 'SETUSER', $user, 'on', '>s3cr3t', '~*', '+eval', '+evalsha', '+time', '+hmget', '+hset', '+pexpireat', '+pexpiretime', '+hdel')
		  foreach $master, $replica;
		$url =~ s{//}{//$user\@};
		$session->set(redis_passfile => password_file('s3cr3t'));
	}
	$session->set(redis_url => $url);
	$session->answers("SELECT allowed, source FROM rl_check('banned', '5/10s', 0)", 't|redis', "$what: no ban that has ended");
	$session->answers("SELECT remaining FROM rl_check('full', $limit, 0)", 2, "$what: no earlier state");
	$session->answers("SELECT allowed FROM rl_check('new', 'fixed_window 1/1d', 0)", 'f', "$what: quota 0 is refused as the master says");
	$session->answers('SELECT redis FROM rl_status()', '"127.0.0.1:' . $master->port . '"', "$what: the master is asked");
}
$session->set(redis_passfile => undef, redis_url => $replica->url(tcp => 1) . ',127.0.0.1:' . $replica->port);
$session->fails($take, 'a list of replicas', 'PT504', qr/^could not connect to Redis: the server is a replica$/);
$session->set(redis_url => $replica->url(tcp => 1));
$session->answers("SELECT allowed, remaining FROM rl_check('full', $limit)", 'f|0', 'a URL with one server: a replica refuses');
# Old data allow nothing, also not what costs nothing.
foreach my $call ((map { "SELECT rl_check('new', '$_ 1/1d', 0)" } qw(throttle token_bucket fixed_window sliding_window sliding_log concurrent), 'fixed_window 1/1d, throttle'),
	"SELECT rl_reserve('new', '5/1d', 0, 'id')", "SELECT count(*) FROM rl_check_many('{new,full}', $limit, '{0,1}')",
	map { "SELECT count(*) FROM $_" } "rl_check_many('{new,other}', '5/1d', '{0,0}')", "rl_check_all('{new,other}', '{5/1d,5/1d}', '{0,0}')")
{
	$session->fails($call, "a replica: $call", 'PT504', qr/^Redis answered with an error: READONLY/);
}

# A server that does not know HELLO, and one that does not permit it, are asked.
foreach my $error ("ERR unknown command 'HELLO', with args beginning with: ", "NOPERM User default has no permissions to run the 'hello' command")
{
	my $liar = LyingServer->new(sub { return $_[0] eq 'HELLO' ? "-$error\r\n" : ":0\r\n" }, tcp => 1);

	$session->set(redis_url => $liar->url . ',127.0.0.1:1');
	is($session->attempt($take)->{state}, '00000', "after $error: the server is asked");
}

done_testing();
