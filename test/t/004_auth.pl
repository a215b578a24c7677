# Passwords, users, databases and URLs: which of them Redis receives, which of them
# are errors, and no password is ever shown.
#
# Runs once with a server: the server checks passwords.
use RatelimitTest;
use LyingServer;
use POSIX ();

my $password = 'sesame:@/?#%41{} "\'$x';
my $redis = RedisServer->new(password => $password)->start;
my $open = RedisServer->new->start;
my $node = new_node($redis);
my $session = session($node);
my $dir = PostgreSQL::Test::Utils::tempdir;
my $take = q{SELECT rl_throttle('auth', 7, 1, 86400)};
my $look = q{SELECT rl_throttle('auth', 7, 1, 86400, 0)};
my $passfile = "$dir/password";

sub write_file
{
	my ($file, $content, $mode) = @_;

	unlink $file;
	append_to_file($file, $content);
	chmod $mode, $file;
	return $file;
}

sub with { $session->set(@_); return; }

sub fails
{
	my $got = $session->fails($take, @_);

	unlike("$got->{message} $got->{detail}", qr/sesame|s3cr3t/, "$_[0]: no password in it");
	return;
}

sub works { $session->works($look, @_); return; }

# Returns the server's list of clients.
sub clients
{
	return $_[0]->cli('CLIENT', 'LIST', 'TYPE', 'normal');
}

#
# A password
#

fails('no password', 'PT504', qr/NOAUTH/, qr/ratelimit\.redis_passfile names no file with a password\.$/);
with(redis_url => $redis->url(db => 2));
fails('no password and a database', 'PT504', qr/NOAUTH/);
with(redis_url => $redis->url);

write_file($passfile, "$password\n", 0600);
with(redis_passfile => $passfile);
works('a password');
write_file($passfile, $password, 0400);
with(redis_passfile => "$dir/./password");
works('a password without an end of line, in a read-only file');
write_file($passfile, "$password\r\nanother line\n", 0600);
with(redis_passfile => $passfile);
works('a password, a carriage return, another line');

# Each policy: a store that rejects the password is a store that fails.
write_file("$dir/wrong", "s3cr3t\n", 0600);
with(redis_passfile => "$dir/wrong");
fails('a wrong password', 'PT504', qr/WRONGPASS/, qr/The password is that of ratelimit\.redis_passfile\.$/);
with(on_error => 'allow');
is($session->attempt($take)->{answer}, '(t,7,,,,,fail_open)', 'a wrong password: on_error = allow');
with(on_error => 'deny');
is($session->attempt($take)->{answer}, '(f,7,,,,,fail_closed)', 'a wrong password: on_error = deny');
is($session->attempt(q{SELECT rl_peek('auth', '7/1d')})->{state}, 'PT504', 'a wrong password: rl_peek raises an error');
with(on_error => 'error');

# A password for a server that needs no password.
with(redis_url => $open->url, redis_passfile => $passfile);
fails('a password that the server does not need', 'PT504', qr/AUTH/);
with(redis_passfile => '');
works('no password for a server that needs no password');

#
# A user
#

$redis->cli('ACL', 'SETUSER', 'limiter', 'on', '>s3cr3t user', '~rl:*', '+@all');
write_file("$dir/user", "s3cr3t user\n", 0600);
with(redis_url => $redis->url(user => 'limiter'), redis_passfile => "$dir/user");
works('a user');
like(clients($redis), qr/user=limiter/, 'a user: Redis knows the client by this name');
like(clients($redis), qr/name=ratelimit:main:@{[ $session->pid ]} .*user=limiter/, 'a user: the name of the connection');
with(redis_url => $redis->url(user => 'limiter', tcp => 1) . ',127.0.0.1:1');
works('a user and a list');
like(clients($redis), qr/name=ratelimit:main:@{[ $session->pid ]} .*user=limiter/, 'a user and a list: the name of the connection');
with(redis_url => $redis->url(user => 'nobody'));
fails('an unknown user', 'PT504', qr/WRONGPASS/);
with(redis_url => $redis->url(user => 'limiter', tcp => 1));
works('a user over TCP');
with(redis_passfile => $passfile);
fails('another user\'s password', 'PT504', qr/WRONGPASS/);

# A user without permission to run scripts: an error, not a verdict.
$redis->cli('ACL', 'SETUSER', 'reader', 'on', '>s3cr3t user', '~*', '+@read');
with(redis_url => $redis->url(user => 'reader'), redis_passfile => "$dir/user");
fails('a user without permissions', 'PT504', qr/NOPERM/);
with(redis_passfile => '');
is($session->attempt($take)->{state}, '22023', 'a user without a password is an error');

#
# The file
#

with(redis_url => $redis->url);
foreach my $mode (0644, 0640, 0604, 0660, 0620, 0610)
{
	my $name = sprintf '%s/mode%04o', $dir, $mode;

	write_file($name, "$password\n", $mode);
	with(redis_passfile => $name);
	fails((sprintf 'a file of mode %04o', $mode), '42501', qr/has group or world access/);
}
with(redis_passfile => "$dir/missing");
fails('no file', '58P01', qr/could not \w+ file .*missing/);
with(redis_passfile => $dir);
is($session->attempt($take)->{state}, '42809', 'a directory');
POSIX::mkfifo("$dir/pipe", 0600) or die "no pipe: $!";
with(redis_passfile => "$dir/pipe");
is($session->attempt($take)->{state}, '42809', 'a pipe that no process writes to');
with(redis_passfile => write_file("$dir/empty", '', 0600));
fails('an empty file', 'F0000', qr/holds no password/);
with(redis_passfile => write_file("$dir/long", ('x' x 100_000) . "\n", 0600));
fails('an endless password', 'F0000', qr/too long/);
with(redis_passfile => $passfile);
works('after wrong files');

#
# The database
#

foreach my $tcp (0, 1)
{
	my $way = $tcp ? 'TCP' : 'a socket';

	with(redis_url => $redis->url(db => 5, tcp => $tcp));
	$redis->cli('SELECT', 5);
	$redis->cli('DEL', 'rl:{auth}');
	is($session->attempt($take)->{answer}, '(t,7,6,,86400,"throttle 1/1d burst 7",redis)', "database 5 over $way: another state");
	is_deeply($redis->cli('KEYS', '*'), ['rl:{auth}'], "database 5 over $way: the key is in database 5");
	$redis->cli('SELECT', 0);
	is_deeply($redis->cli('KEYS', '*'), [], "database 5 over $way: the key is not in database 0");
}
with(redis_url => $redis->url(db => 16));
fails('no such database', 'PT504', qr/DB index is out of range/);
is_deeply($redis->cli('KEYS', '*'), [], 'no such database: nothing is charged in database 0');
$redis->cli('FLUSHDB');

# A new connection selects the database again.
with(redis_url => $redis->url(db => 5));
works('database 5 again');
$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal');
works('database 5 after the connection was killed');
is_deeply($redis->cli('KEYS', '*'), [], 'database 5 after the connection was killed: database 0 is empty');

#
# The next call uses a changed setting, and the old connection is closed
#

my $before = count_of(qr/^id=/m, clients($redis));
foreach my $round (1 .. 5)
{
	with(redis_url => $open->url, redis_passfile => '');
	works('the open server');
	with(redis_url => $redis->url(tcp => $round % 2), redis_passfile => $passfile);
	works('the closed server');
}
await('connections to be gone', sub { return count_of(qr/^id=/m, clients($redis)) <= $before });
pass('abandoned connections are closed');

# The next connection uses a new password in the same file.
$redis->cli('CONFIG', 'SET', 'requirepass', 'changed');
write_file($passfile, "changed\n", 0600);
$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal');
works('a changed password');

#
# No copy of a password stays in the backend's memory
#

# Returns how many times the bytes are in the private memory of the process, if told
# so without the stack; undef if the memory cannot be read.
sub found_in_memory
{
	my ($pid, $bytes, $no_stack) = @_;
	my $found = 0;

	no warnings 'portable';
	open my $memory, '<:raw', "/proc/$pid/mem" or return undef;
	foreach my $line (split /\n/, slurp_file("/proc/$pid/maps"))
	{
		my ($from, $to) = $line =~ /^(\w+)-(\w+) rw.p/ or next;
		next if $no_stack && $line =~ /\[stack\]/;
		my $part = '';

		sysseek $memory, hex $from, 0 or next;
		while (length $part < hex($to) - hex($from))
		{
			last if !sysread $memory, $part, hex($to) - hex($from) - length $part, length $part;
		}
		$found += count_of(qr/\Q$bytes\E/, $part);
	}
	return $found;
}

# A long password, so that a part of it in memory shows that it was there.
my $part = 'xyzzy-plugh-';
my $long = $part x 40;

$redis->cli('CONFIG', 'SET', 'requirepass', $long);
with(redis_url => $redis->url(tcp => 1));
SKIP:
{
	my $pid = $session->pid;
	my $authenticated = 0;
	my $sentinel = LyingServer->new(sub {
			my ($command) = @_;

			$authenticated = 1 if $command eq 'AUTH';
			return ("+OK\r\n") if $command eq 'AUTH';
			return ("-NOAUTH Authentication required.\r\n") if !$authenticated;
			return ("*2\r\n\$9\r\n127.0.0.1\r\n\$" . length($redis->port) . "\r\n" . $redis->port . "\r\n");
		}, tcp => 1);
	my $silent = LyingServer->new(sub { return (\1000) });
	my $without = sub {
		my ($what, $no_stack) = @_;

		is(found_in_memory($pid, $part, $no_stack), 0, "$what: the password is no longer in memory");
	};

	# The shadow memory of AddressSanitizer has terabytes.
	skip 'AddressSanitizer is there', 7 if $ENV{RATELIMIT_PRELOAD};
	skip 'the memory of another process cannot be read', 7 unless defined found_in_memory($pid, $part);
	with(redis_passfile => write_file("$dir/long-password", "$long\n", 0600));
	cmp_ok(found_in_memory($pid, 'long-password'), '>', 0, 'the path of the password file is in memory');
	works('a long password');
	$without->('connected');
	with(redis_passfile => write_file("$dir/no-password", "$part$long\nthe second line has $part, too\n", 0600));
	fails('a wrong long password', 'PT504', qr/WRONGPASS/);
	$without->('refused');
	with(redis_passfile => write_file("$dir/endless-password", $long x 10, 0600));
	fails('an endless password again', 'F0000', qr/too long/);
	$without->('too long');
	with(redis_passfile => "$dir/long-password", redis_url => "redis+sentinel://127.0.0.1:" . $sentinel->port . '/service');
	works('a Sentinel that wants a password');
	$without->('a Sentinel');
	with(redis_url => "rediss://localhost:1", tls_cert_file => '/nowhere');
	is($session->attempt($take)->{state}, '22023', 'a wrong setting for TLS');
	$without->('an error');
	with(redis_url => $silent->url, tls_cert_file => '');
	$session->ask("SET ratelimit.command_timeout = '100ms'");
	fails('no answer to AUTH', 'PT504', qr/timeout has passed/);
	$without->('no answer');

	# For a signal's handler the kernel saves the registers on the stack, and memcpy()
	# may have left a part of the password in them.
	$session->ask('RESET ratelimit.command_timeout');
	is($session->state_under_timeout('200ms', $take), '57014', 'a call is canceled during AUTH');
	$without->('canceled', 1);
}

#
# URLs
#

with(redis_passfile => '');
my $port = $open->port;
foreach my $url ("redis://127.0.0.1:$port", "redis://127.0.0.1:$port/", "redis://127.0.0.1:$port/0",
	"redis://localhost:$port/15", 'unix://' . $open->socket, 'unix://' . $open->socket . '?db=3')
{
	with(redis_url => $url);
	works($url);
}

# A bad URL must not make the call use the default, or the open connection.
foreach my $url ('', ' ', 'localhost', '127.0.0.1:6379', 'http://127.0.0.1', 'REDIS', 'redis:/127.0.0.1',
	'redis://', 'redis://:6379', 'redis://@127.0.0.1', 'redis://127.0.0.1:', "redis://127.0.0.1:$port/x",
	"redis://127.0.0.1:$port/1/2", "redis://127.0.0.1:$port/-1", "redis://127.0.0.1:$port?db=1",
	'redis://127.0.0.1:0', 'redis://127.0.0.1:65536', 'redis://127.0.0.1:99999999999', 'redis://127.0.0.1:6e3',
	"redis://127.0.0.1 :$port", 'redis://[::1', 'redis://[]:6379', "redis://127.0.0.1:$port/65536",
	'redis://' . ('h' x 1000), 'unix://', 'unix:///', 'unix://relative', 'unix://' . $open->socket . '?x=1',
	'unix://' . $open->socket . '?db=', 'unix://' . $open->socket . '?db=1x', 'unix:///' . ('x' x 200),
	" redis://127.0.0.1:$port", "redis://127.0.0.1:$port ", 'redis://a@b@127.0.0.1')
{
	with(redis_url => $open->url);
	works('a good URL');
	with(redis_url => $url);
	is($session->attempt($take)->{state}, $url eq 'unix:///' ? 'PT504' : '22023',
		'bad URL "' . substr($url, 0, 60) . '"');
}

# A password in the URL is an error, and is never shown: neither to the client nor
# in the log, which shows statements only if they fail.
my @with_password = ("redis://:s3cr3t\@127.0.0.1:$port", "redis://user:s3cr3t\@127.0.0.1:$port/1",
	"redis://user:s3cr3t\@\@127.0.0.1:$port", "redis://user:s3\@cr3t\@127.0.0.1:$port",
	"redis://user:s3cr3t/x\@127.0.0.1:$port", 'redis://:s3cr3t@' . ('h' x 1000),
	'unix://user:s3cr3t@' . $open->socket, 'unix://:s3cr3t@relative', 'redis://:s3cr3t@',
	"rediss://:s3cr3t\@127.0.0.1:$port", "REDIS://:s3cr3t\@127.0.0.1:$port");
$session->ask("DO 'BEGIN RAISE LOG \$\$the log works\$\$; END'");
foreach my $url (@with_password)
{
	(my $shown = substr $url, 0, 60) =~ s/s3\@?cr3t/****/;
	foreach my $policy (qw(error allow deny))
	{
		with(redis_url => $url, on_error => $policy);
		fails("a password in $shown, on_error = $policy", '22023', qr/redis_url/);
	}
	$session->ask($take);
	like($session->error, qr/22023/, 'an error with its context');
	unlike($session->error, qr/cr3t/, 'the context shows no password');
}

# The log shows no password of a file.
like(slurp_file($node->logfile), qr/the log works/, 'the log shows the test\'s message');
unlike(slurp_file($node->logfile), qr/sesame|s3\@?cr3t/, 'the log shows no password');

done_testing();
