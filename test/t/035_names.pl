# Names: in Redis no two keys have one name, also of different prefixes, and each name is read
# back.  In shared memory two keys, or two lists of limits, are never confused, even if they were
# constructed to have the same hash.
#
# RATELIMIT_SEED repeats a run.
#
# Runs once: the names are C only.
use RatelimitTest;
use Engines;

my ($redis, $node, $session) = start_servers(\&shared_node);

# Returns a program's output.
sub output_of
{
	my (@command) = @_;
	my $output = '';

	IPC::Run::run(\@command, '>', \$output) or die "@command failed";
	return $output;
}

#
# Names in Redis
#

# The braces of a tag are the only ones that are not escaped.
sub name_of
{
	my ($key) = @_;
	my $escape = sub { return $_[0] =~ s/([%{}])/sprintf '%%%02X', ord $1/ger };

	return $key =~ /^\{([^}]+)\}(.+)$/ ? '{' . $escape->($1) . '}' . $escape->($2) : '{' . $escape->($key) . '}';
}

{
	my $program = c_program($node, 'test/key_names.c', 'src/redis/key_name.c');
	my (%key, %seen, @wrong);

	foreach my $prefix ('rl:', 'rl', 'rl:7')
	{
		foreach my $line (split /\n/, output_of($program, seed(), $prefix eq 'rl:' && is_long() ? 100_000 : 10_000, $prefix))
		{
			my ($text, $name, $read, @more) = split /\t/, $line;
			my $known = $key{$name} //= "$prefix\t$text";

			push @wrong, $line if @more || $known ne "$prefix\t$text" || $name ne $prefix . name_of($text);
			push @wrong, "$text is the name of $read" if $read ne '-' && name_of($read) ne $text;
			my ($tag, $rest) = $text =~ /^\{((?:[^{}%]|%25|%7B|%7D)+)\}((?:[^{}%]|%25|%7B|%7D)*)$/;
			if (defined $tag && $read eq '-')
			{
				# Such a name is that of no key only if its key has another one.
				my $inside = $tag =~ s/%(25|7B|7D)/chr hex $1/ger;

				push @wrong, "$text is read as no name" unless $rest eq '' ? $inside =~ /^\{[^}]+\}./ : $inside =~ /\}/;
				$seen{'names of no key'}++;
			}
			$seen{'keys with a tag'}++ if $name !~ /\}$/;
			$seen{'names with a tag'}++ if $read =~ /^\{[^}]+\}./;
			$seen{'names without a tag'}++ if $read ne '-' && $read !~ /^\{[^}]+\}./;
		}
	}
	none(\@wrong, 'each key has its own name, which is read back, and no other text is read');
	cmp_ok($seen{$_} || 0, '>', 10, "$_: " . ($seen{$_} || 0))
	  foreach 'keys with a tag', 'names with a tag', 'names without a tag', 'names of no key';
	note scalar(keys %key), ' names';
}

# Keys of tenants, whatever the values are, also by a trigger.
{
	my $values = q(unnest('{"{","}","{}","a","a}b","{a}","{a","a}","%7D","a%7D",":","a:",""}'::text[]));

	$redis->cli('FLUSHALL');
	$session->ask(qq[
		CREATE TABLE member (org text, name text);
		INSERT INTO member SELECT org, name FROM $values org, $values name;
		CREATE FUNCTION member_key(org text, name text) RETURNS text LANGUAGE sql STABLE AS
			\$\$SELECT '{' || rl_key(org) || '}' || rl_key('user', name)\$\$;
		CREATE TABLE act (org text, name text);
		CREATE TRIGGER enforce BEFORE INSERT ON act FOR EACH ROW
			EXECUTE FUNCTION rl_enforce('{{{org}}}user:{name}', '5/1h');
		CREATE TRIGGER starts BEFORE INSERT ON act FOR EACH ROW EXECUTE FUNCTION rl_enforce('{org}:x', '500/1h')]);
	is($session->ask('SELECT count(DISTINCT member_key(org, name)) FROM member'), 169, 'each pair has its own key');
	is($session->ask('INSERT INTO act SELECT * FROM member; SELECT count(*) FROM act'), 169, 'a trigger');
	is($session->ask(q{SELECT count(*) FROM member, rl_peek(member_key(org, name), '5/1h', 0) WHERE remaining = 4}), 169,
		'the trigger has the same keys');
	is($session->ask(q{SELECT count(*) FROM (SELECT DISTINCT org FROM member) o, rl_peek(rl_key(org, 'x'), '500/1h', 0) WHERE remaining = 487}), 13,
		'a value at the start of a key too');
	is($session->ask('SELECT count(rl_ban(member_key(org, name), 60)) FROM member'), 169, 'all are banned');
	is($session->ask('SELECT count(*) FROM (SELECT member_key(org, name) FROM member EXCEPT SELECT key FROM rl_bans()) k'), 0, 'rl_bans returns all of them');
	is($session->ask('SELECT count(*) FROM rl_bans()'), 169, 'and no other key');
	my @names = @{ $redis->cli('KEYS', '*') };
	is(scalar @names, 169 + 13, 'Redis has these keys, and those that begin with a value');
	my %tags = map { /^rl:\{([^{}]+)\}user:[^{}]*$/ ? ($1 => 1) : () } @names;
	is(join(' ', sort keys %tags), join(' ', sort map { s/([%{}:])/sprintf '%%25%02X', ord $1/ger } '{', '}', '{}', 'a', 'a}b', '{a}', '{a', 'a}', '%7D', 'a%7D', ':', 'a:'),
		'the tag of a name is the tenant');
	is(scalar(grep { /\}./ && !/^rl:\{[^{}]+\}user:/ } @names), 0, 'no value makes a tag');
}

#
# Keys
#

# With lookup3 as the hash, about ten of these pairs in the long form would have one name, two of the others.
{
	my $n = is_long() ? 800_000 : 200_000;
	my $pairs = PostgreSQL::Test::Utils::tempdir . '/pairs';

	IPC::Run::run([ c_program($node, 'test/colliding_keys.c'), $n ], '>', $pairs) or die 'no pairs';
	$session->ask("CREATE UNLOGGED TABLE pair (a text, b text); COPY pair FROM '$pairs'");
	is($session->ask('SELECT count(*) FROM pair WHERE a <> b AND length(a) = length(b)'), $n, "there are $n pairs");
	$session->ask(q{
		SET ratelimit.store = local;
		CREATE FUNCTION share_a_name() RETURNS bigint LANGUAGE plpgsql AS $$
		DECLARE
			p pair;
			n bigint := 0;
		BEGIN
			FOR p IN SELECT * FROM pair LOOP
				PERFORM rl_ban(p.a, 60);
				n := n + rl_unban(p.b)::int;
				PERFORM rl_unban(p.a);
			END LOOP;
			RETURN n;
		END $$});
	is($session->ask('SELECT share_a_name()'), 0, 'a ban of a key of a pair is not a ban of the other key');
	is($session->ask('SELECT local_keys FROM rl_status()'), 0, 'each ban was on the key itself, and was ended');
	$session->ask('RESET ratelimit.store');
}

#
# Limits
#

# hash_bytes_extended() gives these the same hash on a little-endian machine.
{
	my @limits = ('fixed_window 1546365531/428828349us', 'fixed_window 2086024919/445939782us');
	my $check = sub {
		my ($limits, $quota) = @_;

		return $session->ask("SELECT allowed, source FROM rl_check('one key', '$limits', $quota)");
	};

	$session->ask(q{SELECT rl_stat_reset(); SET ratelimit.debug_now = '1000000000000000'});
	is($check->($limits[0], 1546365531), 't|redis', 'a limit becomes used up');
	is($check->($limits[0], 1), 'f|redis', 'the limit refuses');
	is($check->($limits[0], 1), 'f|denial_cache', 'the denial cache refuses');
	is($check->($limits[1], 1), 't|redis', 'another limit with the same hash is not refused');
	is($session->ask('SELECT limits, allowed, denied, from_cache FROM rl_stat ORDER BY 1'),
		"$limits[0]|1|2|1\n$limits[1]|1|0|0", 'the statistics have a row for each of both limits');

	# Leases compare limits by their numbers.
	$session->ask(q{SET ratelimit.debug_clock = '1000000'});
	$session->ask("SELECT count(rl_check('lease', '$limits[0] lease 50ms')) FROM generate_series(1, 17)");
	is($session->ask("SELECT source FROM rl_check('lease', '$_->[0]')"), $_->[1], "$_->[0] after a lease under $limits[0] lease 50ms")
	  foreach [ "$limits[1] lease 50ms", 'redis' ], [ $limits[0], 'redis' ], [ "$limits[0] lease 40ms", 'redis' ], [ "$limits[0] lease 50ms", 'lease' ];
	$session->ask('RESET ratelimit.debug_now; RESET ratelimit.debug_clock');
}

#
# The hash
#

# The vectors of the reference implementation, github.com/veorq/SipHash.
is(output_of(c_program($node, 'test/siphash.c', 'src/algorithm/siphash.c')), join('', map { "$_\n" } map { split } <DATA>), 'SipHash-2-4-128 of the published test vectors');

done_testing();

__DATA__
a3817f04ba25a8e66df67214c7550293 da87c1d86b99af44347659119b22fc45 8177228da4a45dc7fca38bdef60affe4 9c70b60c5267a94e5f33b6b02985ed51
f88164c12d9c8faf7d0f6e7c7bcd5579 1368875980776f8854527a07690e9627 14eeca338b208613485ea0308fd7a15e a1f1ebbed8dbc153c0b84aa61ff08239
3b62a9ba6258f5610f83e264f31497b4 264499060ad9baabc47f8b02bb6d71ed 00110dc378146956c95447d3f3d0fbba 0151c568386b6677a2b4dc6f81e5dc18
d626b266905ef35882634df68532c125 9869e247e9c08b10d029934fc4b952f7 31fcefac66d7de9c7ec7485fe4494902 5493e99933b0a8117e08ec0f97cfc3d9
6ee2a4ca67b054bbfd3315bf85230577 473d06e8738db89854c066c47ae47740 a426e5e423bf4885294da481feaef723 78017731cf65fab074d5208952512eb1
9e25fc833f2290733e9344a5e83839eb 568e495abe525a218a2214cd3e071d12 4a29b54552d16b9a469c10528eff0aae c9d184ddd5a9f5e0cf8ce29a9abf691c
2db479ae78bd50d8882a8a178a6132ad 8ece5f042d5e447b5051b9eacb8d8f6f 9c0b53b4b3c307e87eaee08678141f66 abf248af69a6eae4bfd3eb2f129eeb94
0664da1668574b88b935f3027358aef4 aa4b9dc4bf337de90cd4fd3c467c6ab7 ea5c7f471faf6bde2b1ad7d4686d2287 2939b0183223fafc1723de4f52c43d35
7c3956ca5eeafc3e363e9d556546eb68 77c6077146f01c32b6b69d5f4ea9ffcf 37a6986cb8847edf0925f0f1309b54de a705f0e69da9a8f907241a2e923c8cc8
3dc47d1f29c448461e9e76ed904f6711 0d62bf01e6fc0e1a0d3c4751c5d3692b 8c03468bca7c669ee4fd5e084bbee7b5 528a5bb93baf2c9c4473cce5d0d22bd9
df6a301e95c95dad97ae0cc8c6913bd8 801189902c857f39e73591285e70b6db e617346ac9c231bb3650ae34ccca0c5b 27d93437efb721aa401821dcec5adf89
89237d9ded9c5e78d8b1c9b166cc7342 4a6d8091bf5e7d651189fa94a250b14c 0e33f96055e7ae893ffc0e3dcf492902 e61c432b720b19d18ec8d84bdc63151b
f7e5aef549f782cf379055a608269b16 438d030fd0b7a54fa837f2ad201a6403 a590d3ee4fbf04e3247e0d27f286423f 5fe2c1a172fe93c4b15cd37caef9f538
2c97325cbd06b36eb2133dd08b3a017c 92c814227a6bca949ff0659f002ad39e dce850110bd8328cfbd50841d6911d87 67f14984c7da791248e32bb5922583da
1938f2cf72d54ee97e94166fa91d2a36 74481e9646ed49fe0f6224301604698e 57fca5de98a9d6d8006438d0583d8a1d 9fecde1cefdc1cbed4763674d9575359
e3040c00eb28f15366ca73cbd872e740 7697009a6a831dfecca91c5993670f7a 5853542321f567a005d547a4f04759bd 5150d1772f50834a503e069a973fbd7c
