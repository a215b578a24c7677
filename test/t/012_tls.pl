# rediss://: the server must prove its identity, a client can do so, and waits,
# interrupts and failures are as without TLS.
#
# Runs once with a server: it depends on the server and on hiredis.
use RatelimitTest;
use Errno;
use IO::Socket::INET;
use POSIX ();
use RedisCluster;

my $dir = PostgreSQL::Test::Utils::tempdir_short;
my $take = q{SELECT rl_throttle('tls', 7, 1, 86400)};
my $look = q{SELECT rl_throttle('tls', 7, 1, 86400, 0)};

sub openssl
{
	my (@args) = @_;

	system_or_bail('openssl', @args);
	return;
}

# Makes a key and a certificate for names such as "IP:127.0.0.1", valid until the end
# of the year, signed by the authority or by itself.
sub certificate
{
	my ($name, $subject_names, $authority, $year) = @_;
	my @key = (qw(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout), "$dir/$name.key");

	if (!$authority)
	{
		openssl('req', '-x509', @key, '-out', "$dir/$name.crt", '-days', 30, '-subj', "/CN=$name");
		return;
	}
	append_to_file("$dir/$name.ext", "subjectAltName = $subject_names\n");
	openssl('req', '-new', @key, '-out', "$dir/$name.csr", '-subj', "/CN=$name");
	openssl('ca', '-batch', '-config', "$dir/ca.conf", '-in', "$dir/$name.csr", '-out', "$dir/$name.crt",
		'-cert', "$dir/$authority.crt", '-keyfile', "$dir/$authority.key", '-extfile', "$dir/$name.ext",
		'-notext', '-startdate', '20200101000000Z', '-enddate', ($year || 2099) . '1231235959Z');
	return;
}

append_to_file("$dir/index", '');
append_to_file("$dir/ca.conf", <<"END");
[ca]
default_ca = any
[any]
database = $dir/index
new_certs_dir = $dir
rand_serial = yes
default_md = sha256
policy = any_name
[any_name]
commonName = supplied
END
certificate('ca');
certificate('other_ca');
certificate('server', 'DNS:localhost, IP:127.0.0.1', 'ca');
certificate('expired', 'DNS:localhost, IP:127.0.0.1', 'ca', 2020);
certificate('elsewhere', 'DNS:redis.example, IP:192.0.2.1', 'ca');
certificate('stranger', 'DNS:localhost, IP:127.0.0.1', 'other_ca');
certificate('client', 'DNS:client.example', 'ca');

my $tls_port = PostgreSQL::Test::Cluster::get_free_port();
my @tls = ('--tls-auth-clients', 'no', '--tls-ca-cert-file', "$dir/ca.crt",
	'--tls-cert-file', "$dir/server.crt", '--tls-key-file', "$dir/server.key");
my $redis = RedisServer->new(args => [ '--tls-port', $tls_port, @tls ])->start;
my $node = new_node($redis);
my $session = session($node);
my $watcher = session($node);

sub with { $session->set(@_); return; }
sub fails { $session->fails($take, @_); return; }
sub works { $session->works($look, @_); return; }

# Sets the certificate that the server shows from the next connection on.
sub show
{
	my ($name) = @_;

	$redis->cli('CONFIG', 'SET', 'tls-cert-file', "$dir/$name.crt", 'tls-key-file', "$dir/$name.key");
	$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal');
	return;
}

my $url = "rediss://127.0.0.1:$tls_port";
my $by_name = "rediss://localhost:$tls_port";
with(redis_url => $url, tls_ca_file => "$dir/ca.crt");
if ($session->attempt($take)->{state} eq '0A000')
{
	foreach my $policy (qw(error allow deny))
	{
		with(on_error => $policy, redis_url => $url);
		fails("without TLS, on_error = $policy", '0A000', qr/^rediss:\/\/ is not supported because ratelimit was built without TLS$/);
		with(redis_url => 'rediss://127.0.0.1:1');
		fails("without TLS and a server, on_error = $policy", '0A000', qr/built without TLS$/);
	}
	note 'ratelimit was built without TLS, so the test ends here';
	done_testing();
	exit;
}

#
# Good certificates
#

works('an address');
with(redis_url => $by_name);
works('a name');
with(redis_url => "$by_name/3");
is($session->attempt($take)->{answer}, '(t,7,6,,86400,"throttle 1/1d burst 7",redis)', 'a database');
$redis->cli('SELECT', 3);
is_deeply($redis->cli('KEYS', '*'), ['rl:{tls}'], 'a database: the key is in this database');
$redis->cli('SELECT', 0);
$redis->cli('ACL', 'SETUSER', 'limiter', 'on', '>s3cr3t', '~rl:*', '+@all');
with(redis_url => "rediss://limiter\@127.0.0.1:$tls_port/3", redis_passfile => password_file('s3cr3t'));
works('a user');
like($redis->cli('CLIENT', 'LIST', 'TYPE', 'normal'), qr/user=limiter/, 'a user: Redis knows the client by this name');
with(redis_passfile => '');

# The extension names a new connection, but does not need permission for it.
$redis->cli('ACL', 'SETUSER', 'default', '-client|setname');
with(redis_url => $url);
works('no permission for CLIENT SETNAME');
$redis->cli('ACL', 'SETUSER', 'default', '+client|setname');

foreach my $version ('TLSv1.2', 'TLSv1.3')
{
	$redis->cli('CONFIG', 'SET', 'tls-protocols', $version);
	with(redis_url => $by_name);
	with(redis_url => $url);
	works($version);

	# TLS tickets, which the server sends unasked, do not make the session reconnect.
	my $before = $redis->field('stats', 'total_connections_received');
	is($session->ask("SELECT count(*) FROM (SELECT rl_throttle('many$version', 5000, 1, 86400) d
			FROM generate_series(1, 5000) OFFSET 0) s WHERE (d).allowed"), 5000, "$version: 5,000 calls");
	like($session->attempt("SELECT rl_throttle('many$version', 5000, 1, 86400)")->{answer}, qr/^\(f,5000,0,/,
		"$version: each call was counted");
	is($redis->field('stats', 'total_connections_received'), $before, "$version: one connection served all calls");
}
$redis->cli('CONFIG', 'SET', 'tls-protocols', '');

#
# Bad certificates: such a server decides nothing, and nothing is charged
#

$redis->cli('FLUSHALL');
foreach my $case (
	[ 'an expired certificate', 'expired', $url, 'ca', qr/certificate has expired/ ],
	[ 'another address', 'elsewhere', $url, 'ca', qr/IP address mismatch/i ],
	[ 'another name', 'elsewhere', $by_name, 'ca', qr/hostname mismatch/i ],
	[ 'an untrusted authority', 'stranger', $url, 'ca', qr/unable to get local issuer certificate/ ],
	[ 'trust in another authority', 'server', $url, 'other_ca', qr/self.signed certificate in certificate chain/ ],
	[ 'a self-signed certificate', 'other_ca', $url, 'ca', qr/self.signed certificate/ ],
	[ 'trust only in the authorities of the system', 'server', $url, '', qr/self.signed certificate in certificate chain/ ])
{
	my ($what, $shown, $from, $trusted, $message) = @$case;

	show($shown);
	with(redis_url => $from, tls_ca_file => $trusted && "$dir/$trusted.crt");
	fails($what, 'PT504', qr/^could not connect to Redis: the server's certificate is not trusted: $message$/);
	with(on_error => 'allow');
	is($session->attempt($take)->{answer}, '(t,7,,,,,fail_open)', "$what: on_error = allow");
	with(on_error => 'deny');
	is($session->attempt($take)->{answer}, '(f,7,,,,,fail_closed)', "$what: on_error = deny");
	with(on_error => 'error');
}
is_deeply($redis->cli('KEYS', '*'), [], 'nothing was charged');
show('server');
with(redis_url => $url, tls_ca_file => "$dir/ca.crt");
works('a good certificate again');

#
# The next call uses a changed setting
#

with(tls_ca_file => "$dir/other_ca.crt");
fails('another authority', 'PT504', qr/not trusted: self.signed certificate in certificate chain/);
with(tls_ca_file => "$dir/ca.crt");
works('the first authority');

#
# What a session keeps: its certificates, until a file's inode, size or time changes, or a
# handshake fails, and with them the session ticket of the server
#

# Writes an authority to the file "kept", which stays the same in what stat() says of it.
sub keep
{
	my ($name, $time) = @_;

	open my $kept, '+>>', "$dir/kept" or die "$dir/kept: $!";
	truncate $kept, 0;
	syswrite $kept, sprintf '%-4096s', slurp_file("$dir/$name.crt");
	close $kept;
	utime $time, $time, "$dir/kept" or die "$dir/kept: $!";
	return;
}

keep('ca', 1_000_000_000);
with(tls_ca_file => "$dir/kept");
works('an authority in a file');
keep('other_ca', 1_000_000_000);
show('server');
works('a connection needs no file that has not changed');
show('stranger');
fails('a file that is read after a failed handshake', 'PT504', qr/not trusted: unable to get local issuer certificate/);
works('a file that is read after a failed handshake');
keep('ca', 1_000_000_001);
$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal');
fails('a file with another time', 'PT504', qr/not trusted/);
show('server');
works('a file with another time');
with(tls_ca_file => "$dir/ca.crt");

{
	my $port = PostgreSQL::Test::Cluster::get_free_port();
	my ($in, $out) = ('', '');
	my $server = IPC::Run::start([ qw(openssl s_server -crlf -accept), "127.0.0.1:$port", '-cert', "$dir/server.crt", '-key', "$dir/server.key" ],
		'<', \$in, '>', \$out, '2>&1');
	my $next = sub {
		my ($pattern, $answer) = @_;

		await("$pattern", sub { $server->pump_nb; return $out =~ /$pattern/ });
		$in .= $answer;
		await("the answer to $pattern", sub { $server->pump_nb; return $in eq q{} });
		return;
	};
	my $connects = sub {
		my ($database) = @_;

		$out = '';
		with(redis_url => "rediss://127.0.0.1:$port/$database");
		$session->send("SELECT state FROM attempt(\$\$$take\$\$)\n;");
		$next->(qr/CLIENT/, "+OK\n+OK\n");
		$next->(qr/EVALSHA/, "-ERR no\n");
		is($session->ask(''), 'PT504', "database $database of a server that knows no script");
		return;
	};

	$next->(qr/ACCEPT/, '');
	$connects->(1);
	unlike($out, qr/Reused/, 'the first connection begins a session of TLS');
	$connects->(2);
	like($out, qr/Reused/, 'the second connection continues it');
	with(tls_ca_file => "$dir/kept");
	$connects->(3);
	unlike($out, qr/Reused/, 'with another authority the session is not continued');
	with(tls_ca_file => "$dir/ca.crt", redis_url => $url);
	$server->kill_kill;
}

#
# The client's certificate
#

$redis->cli('CONFIG', 'SET', 'tls-auth-clients', 'yes');
$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal');
my $refused = qr/^could not connect to Redis: /;
my $reason = qr/ratelimit\.tls_cert_file\.$/;
fails('no certificate for a server that needs a certificate', 'PT504', $refused, $reason);
$redis->cli('CONFIG', 'SET', 'tls-protocols', 'TLSv1.2');
fails('the same with TLS 1.2', 'PT504', qr/^could not connect to Redis: TLS failed: .*alert/);
$redis->cli('CONFIG', 'SET', 'tls-protocols', '');
with(tls_cert_file => "$dir/client.crt", tls_key_file => "$dir/client.key");
works('a certificate');
with(tls_cert_file => "$dir/stranger.crt", tls_key_file => "$dir/stranger.key");
fails('a certificate that the server does not trust', 'PT504', $refused, $reason);
is_deeply($redis->cli('KEYS', '*'), [], 'nothing was charged');
with(tls_cert_file => "$dir/client.crt", tls_key_file => "$dir/client.key");
works('the first certificate again');

#
# Bad files: an error at once, whatever on_error is
#

append_to_file("$dir/nonsense", "nonsense\n");
openssl('ec', '-in', "$dir/client.key", '-aes256', '-passout', 'pass:s3cr3t', '-out', "$dir/locked.key");
chmod 0600, "$dir/locked.key", "$dir/nonsense";
system_or_bail('cp', "$dir/client.key", "$dir/open.key");
chmod 0640, "$dir/open.key";
POSIX::mkfifo("$dir/pipe", 0600) or die "no pipe: $!";
with(on_error => 'allow');
foreach my $case (
	[ 'no such authority', 'tls_ca_file', 'missing', '58P01', qr/could not stat file/ ],
	[ 'a directory as authority', 'tls_ca_file', '.', '42809', qr/is not a plain file/ ],
	[ 'a pipe as authority', 'tls_ca_file', 'pipe', '42809', qr/is not a plain file/ ],
	[ 'a nonsensical authority', 'tls_ca_file', 'nonsense', 'F0000', qr/could not load .*"ratelimit\.tls_ca_file"/ ],
	[ 'no such certificate', 'tls_cert_file', 'missing', '58P01', qr/could not stat file/ ],
	[ 'a nonsensical certificate', 'tls_cert_file', 'nonsense', 'F0000', qr/could not load .*"ratelimit\.tls_cert_file"/ ],
	[ 'a certificate without its key', 'tls_key_file', undef, '22023', qr/must be set together/ ],
	[ 'a key without its certificate', 'tls_cert_file', undef, '22023', qr/must be set together/ ],
	[ 'no such key', 'tls_key_file', 'missing', '58P01', qr/could not stat file/ ],
	[ 'a pipe as key', 'tls_key_file', 'pipe', '42809', qr/is not a plain file/ ],
	[ 'a nonsensical key', 'tls_key_file', 'nonsense', 'F0000', qr/could not load .*"ratelimit\.tls_key_file"/ ],
	[ "another certificate's key", 'tls_key_file', 'server.key', 'F0000', qr/"ratelimit\.tls_key_file": .*mismatch/ ],
	[ 'a key with a pass phrase', 'tls_key_file', 'locked.key', 'F0000', qr/could not load .*"ratelimit\.tls_key_file"/ ],
	[ 'a key that other users may read', 'tls_key_file', 'open.key', '42501', qr/has group or world access/ ])
{
	my ($what, $setting, $file, $state, $message) = @$case;
	my $before = $session->ask("SHOW ratelimit.$setting");

	with($setting => defined $file ? "$dir/$file" : '');
	fails($what, $state, $message);
	with($setting => $before);
}
with(redis_url => 'rediss://127.0.0.1:1', tls_key_file => "$dir/nonsense");
fails('a nonsensical key and no server', 'F0000', qr/"ratelimit\.tls_key_file"/);
with(on_error => 'error', redis_url => $url, tls_key_file => "$dir/client.key");
works('good files');
$redis->cli('CONFIG', 'SET', 'tls-auth-clients', 'no');
with(tls_cert_file => '', tls_key_file => '');
works('no certificate for a server that needs no certificate');

#
# The wrong port, and a server that sends nothing
#

with(redis_url => 'rediss://127.0.0.1:' . $redis->port, connect_timeout => '200ms');
fails('TLS to a port without TLS', 'PT504', qr/^could not connect/, qr/If it uses no TLS, ratelimit\.redis_url must begin with redis:\/\/\.$/);
with(connect_timeout => undef);
with(redis_url => "redis://127.0.0.1:$tls_port");
fails('no TLS to a port with TLS', 'PT504', qr/^lost the connection/, qr/If it uses TLS, ratelimit\.redis_url must begin with rediss:\/\/\.$/);
with(connect_timeout => '200ms');
{
	my $silent = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 100) or die "no socket: $!";

	with(redis_url => 'rediss://127.0.0.1:' . $silent->sockport);
	my $got;
	my @ms = measures(250, sub { return ($got = $session->attempt($take))->{ms} });
	is($got->{state}, 'PT504', 'no handshake: SQLSTATE');
	like($got->{message}, qr/connect_timeout has passed$/, 'no handshake: message');
	cmp_ok(min(@ms), '<=', 250, 'no handshake: the call takes at most connect_timeout + 50 ms');
	{
		my $accepted = $silent->accept;
		my $n;

		1 while $n = sysread $accepted, my $hello, 65536;
		ok(!defined $n && $!{ECONNRESET}, 'no handshake: the connection is reset') or diag $!;
	}
	with(connect_timeout => '10min');
	is($session->state_under_timeout('200ms', $take), '57014', 'no handshake: statement_timeout works');
	$session->ask('RESET ratelimit.connect_timeout');
}
with(redis_url => $url);
works('the right port');

#
# A server that is suspended, killed and restarted
#

my $pid = $session->pid;
foreach my $round (0 .. 9)
{
	$session->ask("SELECT rl_reset('tag:' || $round), rl_throttle('tag:' || $round, 100, 1, 86400, $round)");
	works("round $round");
	$redis->pause;
	if ($round % 2)
	{
		with(command_timeout => '100ms');
		my $got = $session->attempt($take);
		is($got->{state}, 'PT504', 'suspended: SQLSTATE');
		cmp_ok($got->{ms}, '>=', 99, 'suspended: the call waits for command_timeout');
		with(command_timeout => '10s');
	}
	else
	{
		$session->send("SELECT state FROM attempt(\$\$$take\$\$)\n;");
		$watcher->await_waiting($pid);
		$watcher->ask("SELECT pg_cancel_backend($pid)");
		is($session->ask(''), '57014', 'suspended: the call can be canceled');
	}
	$redis->resume;
	is($session->ask("SELECT remaining FROM rl_throttle('tag:' || $round, 100, 1, 86400, 0)"),
		100 - $round, 'the next call gets its own answer');
}
$redis->cli('CLIENT', 'KILL', 'TYPE', 'normal');
works('after the connection was ended');
$redis->stop;
fails('a killed server', 'PT504', qr/Connection refused/);
$redis->start;
show('server');
works('after a restart');
is($session->pid, $pid, 'one backend made all calls');

# A redirect in a cluster leads to another connection with TLS.
{
	my @ports;
	my $cluster = RedisCluster->new(masters => 2, args => sub {
		push @ports, PostgreSQL::Test::Cluster::get_free_port();
		return ('--tls-port', $ports[-1], '--tls-cluster', 'yes', @tls);
	});

	with(redis_url => "rediss://127.0.0.1:$ports[0]", tls_ca_file => "$dir/ca.crt");
	is($session->ask(q{SELECT count(*) FROM generate_series(1, 50) n, rl_throttle('tls:' || n, 1, 1, 86400) WHERE source = 'redis'}),
		50, 'a cluster with TLS');
	foreach my $i (0, 1)
	{
		cmp_ok($cluster->master($i)->cli('DBSIZE'), '>', 0, "node $i has keys");
		like($cluster->master($i)->cli('CLIENT', 'LIST'), qr/ laddr=127\.0\.0\.1:$ports[$i] .* cmd=evalsha /, "node $i received its calls over TLS");
	}
	with(redis_url => "rediss://localhost:$ports[1]");
	is($session->ask(q{SELECT count(*) FROM generate_series(1, 50) n, rl_throttle('tls:' || n, 1, 1, 86400) WHERE NOT allowed}),
		50, 'another node redirects too');
}

done_testing();
