# A key is the same key in Redis for databases of all encodings, and Redis stores it
# in UTF-8.
use RatelimitTest;

my $redis = RedisServer->new->start;
my $node = new_node($redis, "ratelimit.key_prefix = 'enc:'");
my %encoding = (utf8 => 'UTF8', latin1 => 'LATIN1', latin9 => 'LATIN9', eucjp => 'EUC_JP', ascii => 'SQL_ASCII');
my %session;

foreach my $database (sort keys %encoding)
{
	$node->safe_psql('postgres', qq{CREATE DATABASE $database TEMPLATE template0
		ENCODING '$encoding{$database}' LC_COLLATE 'C' LC_CTYPE 'C'});
	$node->safe_psql($database, q{
		CREATE EXTENSION ratelimit;
		CREATE TABLE orders (customer text);
		CREATE TRIGGER enforce BEFORE INSERT ON orders
			FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '4/1d')});
	$session{$database} = session($node, $database);
	is($session{$database}->ask('SHOW server_encoding'), $encoding{$database}, "database $database");
}
$_->ask('SET client_encoding = UTF8') foreach values %session;

# Returns SQL for text given in UTF-8.  SQL_ASCII has no conversion.
sub text_of
{
	my ($database, $utf8) = @_;

	return $database eq 'ascii' ? "'$utf8'" : "convert_from('\\x" . unpack('H*', $utf8) . "', 'UTF8')";
}

# Takes one unit of ten in each database in turn.
my $cafe = "caf\xc3\xa9:\xc3\xbc\xc3\x9f";
my $left = 10;
foreach my $database (qw(utf8 latin1 latin9 ascii latin1 utf8))
{
	is($session{$database}->ask('SELECT remaining FROM rl_throttle('
			  . text_of($database, $cafe) . ', 10, 1, 86400)'),
		--$left, "the databases share one state: $database");
	is($session{$database}->error, '', "$database: no error");
}
is_deeply($redis->cli('KEYS', '*'), ["enc:{$cafe}"], 'Redis has one key, in UTF-8');
is($session{latin1}->ask('SELECT remaining FROM rl_peek(' . text_of('latin1', $cafe) . q{, '1/1d burst 10', 0)}),
	$left, 'rl_peek in LATIN1 reads this state');
is($session{latin1}->ask('SELECT rl_reset(' . text_of('latin1', $cafe) . ')'), 't', 'rl_reset in LATIN1 deletes this state');
is_deeply($redis->cli('KEYS', '*'), [], 'Redis has no key');

# Japanese.
my $orders = "\xe6\xb3\xa8\xe6\x96\x87";
$left = 10;
foreach my $database (qw(eucjp utf8 ascii eucjp))
{
	is($session{$database}->ask('SELECT remaining FROM rl_check('
			  . text_of($database, $orders) . q{, '1/1d burst 10')}), --$left, "the databases share one state of a Japanese key: $database");
}
is_deeply($redis->cli('KEYS', '*'), ["enc:{$orders}"], 'Redis has one key, in UTF-8');
$redis->cli('FLUSHDB');

# A character with different code points: the euro is 0xA4 in LATIN9.
my $euro = "\xe2\x82\xac";
foreach my $database (qw(latin9 utf8))
{
	$session{$database}->ask("SELECT rl_throttle(" . text_of($database, $euro) . ', 2, 1, 86400)');
}
is_deeply($redis->cli('KEYS', '*'), ["enc:{$euro}"], 'the euro is one key from LATIN9 and UTF8');
$redis->cli('FLUSHDB');

# The trigger, and the message of a refusal.
foreach my $database (qw(latin1 utf8 latin1 utf8))
{
	$session{$database}->ask('INSERT INTO orders VALUES (' . text_of($database, $cafe) . ')');
	is($session{$database}->error, '', "the trigger in $database");
}
(my $escaped = $cafe) =~ s/:/%3A/g;
foreach my $database (qw(latin1 utf8))
{
	$session{$database}->ask('INSERT INTO orders VALUES (' . text_of($database, $cafe) . ')');
	is($session{$database}->state, 'PT429', "the trigger in $database refuses after the rows of both databases");
	like($session{$database}->error, qr/Key "order:\Q$escaped\E"/, "$database: the detail is in its encoding");
}

# A key has at most 512 bytes of UTF-8.
foreach my $case ([ 'latin1', "\xc3\xa9" x 256, '00000' ], [ 'latin1', "\xc3\xa9" x 256 . 'x', '22023' ],
	[ 'latin1', "\xc3\xa9" x 300, '22023' ], [ 'utf8', "\xc3\xa9" x 256, '00000' ],
	[ 'utf8', "\xc3\xa9" x 256 . 'x', '22023' ], [ 'eucjp', "\xe6\xb3\xa8" x 170, '00000' ],
	[ 'eucjp', "\xe6\xb3\xa8" x 171, '22023' ])
{
	my ($database, $key, $state) = @$case;

	$session{$database}->ask('SELECT rl_throttle(' . text_of($database, $key) . ', 1, 1, 1)');
	is($session{$database}->state, $state, sprintf '%d bytes of UTF-8 from %s', length $key, $database);
}

# Bytes that are not UTF-8 are an error, not another key.
$redis->cli('FLUSHDB');
$session{ascii}->ask(q{SELECT rl_throttle(E'caf\\xe9', 1, 1, 1)});
is($session{ascii}->state, '22021', 'bytes that are not text are an error');
is_deeply($redis->cli('KEYS', '*'), [], 'Redis has no key of these bytes');

# Characters that have a meaning for Redis are escaped.
$session{utf8}->ask(q{SELECT rl_throttle('a{b}c%d', 1, 1, 86400)});
is_deeply($redis->cli('KEYS', '*'), ['enc:{a%7Bb%7Dc%25d}'], 'braces and the percent sign are escaped');

done_testing();
