# Triggers: templates of keys, the fields of errors, and rules that no row can satisfy.
#
# Runs once in a suite: PostgreSQL fires the triggers.
use RatelimitTest;

my ($redis, $node, $session) = start_servers(\&shared_node);

# Triggers with mistakes can be created.
$session->ask('SET check_function_bodies = off; SET client_min_messages = error');

#
# Long templates: if their parsing were quadratic, it would take minutes
#

$session->ask(q{SET statement_timeout = '60s';
	CREATE TABLE long (a text);
	DO $$BEGIN EXECUTE format('CREATE TRIGGER enforce BEFORE INSERT ON long FOR EACH ROW EXECUTE FUNCTION rl_enforce(%L, %L)', repeat('x', 5000000), '5/1s'); END$$});
is($session->ask('SELECT problem FROM rl_triggers'), 'key must not be longer than 512 bytes: By its template, it has at least 5000000 bytes in UTF-8.',
	'a template that is too long');
$session->fails(q{INSERT INTO long VALUES ('a')}, 'a row under it', '22023', qr/^key must not be longer than 512 bytes/);
$session->ask('DROP TABLE long; RESET statement_timeout');

#
# Different rows have different keys, whatever separates the columns
#

foreach my $case ([ 'amb-{a}-{b}', 'a-1', 'x', 'amb-a%2D1-x' ], [ 'amb-{a}-{b}', 'a', '1-x', 'amb-a-1-x' ],
	[ '{a}--{b}', 'a-', 'x', 'a%2D--x' ], [ '{a}9.A{b}', 'a.9%', '.', 'a%2E9%259.A.' ], [ '{a}-{b}', 'a%2D', 'x', 'a%252D-x' ],
	[ '{a}-:{b}', 'a-', ':', 'a--:%3A' ], [ '{a}:{b}', 'a-', '-', 'a-:-' ], [ '{b}-{c}', 'x-', '-1', 'x%2D--1' ],
	[ '{u}{a}', '-', 0, '11111111-1111-1111-1111-111111111111-' ])
{
	my ($template, $a, $b, $key) = @$case;

	$b = $template =~ /c/ ? "'$a', $b" : "'$b', 0";
	$session->ask("CREATE TABLE keys (a text, b text, c int, u uuid DEFAULT '11111111-1111-1111-1111-111111111111');
		CREATE TRIGGER enforce BEFORE INSERT ON keys FOR EACH ROW EXECUTE FUNCTION rl_enforce('$template', 'blocked')");
	$session->fails("INSERT INTO keys VALUES ('$a', $b)", "separator: $template", 'PT403', qr/^rate limit/, qr/^Key "\Q$key\E" is blocked\.$/);
	$session->ask('DROP TABLE keys');
}
$session->ask(q{CREATE TABLE keys (a text, b text);
	CREATE TRIGGER t1 BEFORE INSERT ON keys FOR EACH ROW EXECUTE FUNCTION rl_enforce('k:{a}{b}', '5/1s');
	CREATE TRIGGER t2 BEFORE INSERT ON keys FOR EACH ROW EXECUTE FUNCTION rl_enforce('k:{a}2%F{b}', '5/1s')});
is($session->ask('SELECT DISTINCT problem FROM rl_triggers'), 'two values of a rate-limit key must have a separator: '
	. 'Write ":", or another ASCII character except % and 0 to 9 and A to F, between them.', 'columns without a separator');
$session->ask('DROP TABLE keys');

#
# Equal values of citext are one key, also where the locale folds other letters than ASCII
#

$session->ask(q{CREATE DATABASE folding TEMPLATE template0 LOCALE 'C.UTF-8'});
my $folding = session($node, 'folding');
$folding->ask(q{
	CREATE EXTENSION ratelimit;
	CREATE EXTENSION citext;
	CREATE SCHEMA shop;
	CREATE DOMAIN shop.email AS citext;
	CREATE FUNCTION shop.folded(a text) RETURNS citext LANGUAGE sql RETURN a::public.citext;
	CREATE TABLE folded (c citext, d shop.email DEFAULT '', t text)});
foreach my $case ([ 'c:{c}', 'c:änn%3Ab' ], [ 'd:{d}-{c}', 'd:-änn%3Ab' ], [ '{c}-{t}', 'änn%3Ab-Änn%3AB', 'änn%3Ab-änN%3Ab' ], [ 'f:{shop.folded({t})}', 'f:änn%3Ab' ])
{
	my ($template, @keys) = @$case;

	$folding->ask("CREATE OR REPLACE TRIGGER lim BEFORE INSERT ON folded FOR EACH ROW EXECUTE FUNCTION rl_enforce('$template', 'blocked')");
	foreach my $value ('Änn:B', 'änN:b')
	{
		$folding->ends("INSERT INTO folded (c, t) VALUES ('$value', '$value')", "citext: $template: $value", 'PT403');
		like($folding->error, qr/^DETAIL:  Key "\Q$keys[0]\E" is blocked\.$/m, "citext: $template: $value: the key");
		shift @keys if @keys > 1;
	}
}
is($folding->ask(q{SELECT rl_key(7, 'ÄNN'::citext), rl_key(7, 'Ann'::shop.email), rl_key(NULLIF('ANN'::citext, ''), 7)}), '7:änn|7:ann|ann:7', 'citext: rl_key');
is($folding->ask(q{SELECT rl_key('login', 'Ann'::citext), rl_key('login', lower('Ann'::citext::text))}), 'login:Ann|login:ann', 'citext: a parameter of type text hides it');
is($folding->ask(q{SELECT count(*) FILTER (WHERE a = b), bool_and((rl_key(7, a) = rl_key(7, b)) = (a = b))
	FROM (VALUES ('STRASSE'::citext, 'strasse'::citext), ('ÉÈ', 'éè'), ('ΑΣ', 'ας'), ('ΑΣ', 'ασ')) v (a, b)}),
	'3|t', 'citext: values have equal keys if they are equal');
$folding->quit;
$session->ask('DROP DATABASE folding');

#
# Rules that no row can satisfy are problems of the view
#

my $text = 'x' x 512;
my $sliding = join ', ', map { "sliding_log $_/${_}s" } 1 .. 5;
foreach my $case ([ "'{a}$text', '5/1s'", 'key must not be longer than 512 bytes: By its template, it has at least 513 bytes in UTF-8.' ],
	[ "'{b}$text', '5/1s'", '' ],
	[ "'k:{a}', '$sliding', 'l:{a}', '$sliding'",
		'the keys of an action must not have more than 8 limits of sliding_window, sliding_log and concurrent: They have 10.' ])
{
	my ($arguments, $problem) = @$case;

	$session->ask("CREATE TABLE never (a int, b text);
		CREATE TRIGGER enforce BEFORE INSERT ON never FOR EACH ROW EXECUTE FUNCTION rl_enforce($arguments)");
	is($session->ask('SELECT problem FROM rl_triggers'), $problem, "problem: $problem");
	my $got = $session->attempt(q{INSERT INTO never VALUES (1, '')});
	is("$got->{message}: $got->{detail}", $problem || ': ', 'a row has the same error');
	$session->ask('DROP TABLE never');
}

#
# The fields of errors about the values of a row
#

$session->ask(q{
	CREATE TABLE fields (a text, b text, q int);
	CREATE TRIGGER lim BEFORE INSERT ON fields FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', '5/1h', '{b}', '5/1h', 'quota={q}');
	CREATE FUNCTION no_limits(a text) RETURNS rl_limits LANGUAGE sql RETURN NULL::rl_limits;
	CREATE TABLE by_call (a text);
	CREATE TRIGGER lim BEFORE INSERT ON by_call FOR EACH ROW EXECUTE FUNCTION rl_enforce('{a}', 'public.no_limits({a})');
	CREATE FUNCTION no_key(a text) RETURNS text LANGUAGE sql RETURN NULL;
	CREATE TABLE by_key (a text);
	CREATE TRIGGER lim BEFORE INSERT ON by_key FOR EACH ROW EXECUTE FUNCTION rl_enforce('key:{public.no_key({a})}', '5/1h');
	CREATE TABLE sums (a text, b text, q bigint);
	CREATE TRIGGER lim AFTER INSERT ON sums REFERENCING NEW TABLE AS n FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('{a}:{b}', '5/1h', 'quota={q}');
	CREATE TABLE wrong (a text);
	CREATE TRIGGER lim BEFORE INSERT ON wrong FOR EACH ROW EXECUTE FUNCTION rl_enforce('{c}', '5/1h');
	CREATE FUNCTION fields_of(command text) RETURNS text LANGUAGE plpgsql AS $$
		DECLARE s text; t text; c text; n text; m text; d text;
		BEGIN
			EXECUTE command;
			RETURN 'no error';
		EXCEPTION WHEN OTHERS THEN
			GET STACKED DIAGNOSTICS s = SCHEMA_NAME, t = TABLE_NAME, c = COLUMN_NAME, n = CONSTRAINT_NAME, m = MESSAGE_TEXT, d = PG_EXCEPTION_DETAIL;
			RETURN concat_ws('|', s, t, c, n, m, d);
		END$$});
foreach my $case (
	[ q{fields VALUES ('x', 'y', -1)}, 'fields|q', 'quota must be between 0 and 1000000000000000|It comes from column "q".' ],
	[ q{fields VALUES ('', 'y', 1)}, 'fields|a', 'key must not be empty|Its template is "{a}".' ],
	[ q{fields VALUES ('x', repeat('x', 600), 1)}, 'fields|b', 'key must not be longer than 512 bytes|It has 600 bytes in UTF-8. Its template is "{b}".' ],
	[ q{fields VALUES (NULL, 'x', 1)}, 'fields|a', 'null value in column "a" of relation "fields" cannot be part of a rate-limit key|' ],
	[ q{fields VALUES ('x', 'y', NULL)}, 'fields|q', 'null value in column "q" of relation "fields" cannot be a quota|' ],
	[ q{by_call VALUES ('x')}, 'by_call|', 'function public.no_limits(text) returned NULL instead of limits|' ],
	[ q{by_key VALUES ('x')}, 'by_key|', 'function public.no_key(text) returned NULL instead of a part of a rate-limit key|' ],
	[ q{sums SELECT 'x', 'y', 1000000000000000 FROM generate_series(1, 2)}, 'sums|q',
		'quota must be between 0 and 1000000000000000|It comes from column "q".' ],
	[ q{wrong VALUES ('x')}, 'wrong|', 'column "c" of relation "wrong" does not exist|' ])
{
	my ($insert, $place, $text) = @$case;

	is($session->ask("SELECT fields_of(\$x\$INSERT INTO $insert\$x\$)"), "public|$place|lim|$text", "fields: $insert");
}
$session->ask('DROP TABLE fields, by_call, by_key, sums, wrong');

#
# Pairs whose keys are equal in a row are charged one after the other, as FOR EACH STATEMENT
#

my $equal = 0;
foreach my $each ('BEFORE INSERT ON messages FOR EACH ROW', 'AFTER INSERT ON messages FOR EACH ROW', 'AFTER INSERT ON messages REFERENCING NEW TABLE AS n FOR EACH STATEMENT')
{
	# The limits of the two keys, and the outcomes of a row with other keys and of four rows with equal keys, with what is left of the first limits.
	foreach my $case (
		[ 'sliding_log 5/1h', 'sliding_log 5/1h', '00000 4', '00000 2', '00000 0', 'PT429 0', 'PT429 0' ],
		[ 'sliding_log 6/1h', 'sliding_log 6/1h', '00000 5', '00000 3', '00000 1', 'PT429 1', 'PT429 1' ],
		[ 'fixed_window 9/3650d', 'fixed_window 7/3650d', '00000 8', '00000 6', '00000 4', '00000 2', 'PT429 2' ],
		[ '100/1d', 'sliding_log 1/1h', '00000 99', '00000 98', 'PT429 98', 'PT429 98', 'PT429 98' ],
		[ 'concurrent 1/1h', 'concurrent 1/1h', '00000 1', 'PT413 1', 'PT413 1', 'PT413 1', 'PT413 1' ],
		[ '1/1d', '1/1d', '00000 0', 'PT429 0', 'PT429 0', 'PT429 0', 'PT429 0' ],
		[ '100/1d', 'blocked', 'PT403 100', 'PT403 100', 'PT403 100', 'PT403 100', 'PT403 100' ],
		[ '100/1d', 'unlimited', '00000 99', '00000 98', '00000 97', '00000 96', '00000 95' ])
	{
		my ($first, $second, @outcomes) = @$case;
		my $key = 'equal' . ++$equal;
		my @got;

		$session->ask("CREATE TABLE messages (sender text, recipient text);
			CREATE TRIGGER lim $each EXECUTE FUNCTION rl_enforce('$key:{sender}', '$first', '$key:{recipient}', '$second')");
		foreach my $recipient ('bob', ('ann') x 4)
		{
			push @got, $session->attempt("INSERT INTO messages VALUES ('ann', '$recipient')")->{state} . ' ' . $session->left($first, "$key:ann");
		}
		is(join(', ', @got), join(', ', @outcomes), "equal keys: $each, $first, $second");
		$session->ask('DROP TABLE messages');
	}
}
$session->ask(q{CREATE TABLE messages (sender text, recipient text);
	CREATE TRIGGER lim BEFORE INSERT ON messages FOR EACH ROW EXECUTE FUNCTION rl_enforce('{sender}', '1/1d', '{recipient}', '1/1d')});
$session->fails(q{INSERT INTO messages VALUES ('ann', 'ann')}, 'equal keys: more than the limit', 'PT413', qr/^statement takes more than rate limit "throttle 1\/1d" ever allows$/,
	qr/^Key "ann" never has more than 1\. The statement charged 1 before\.$/);
$session->fails(q{SELECT rl_check_all('{ann,ann}', '{1/1d,1/1d}')}, 'equal keys: rl_check_all', '22023', qr/^an action must not have the same key twice$/);
$session->ask('DROP TABLE messages');

#
# A function in SQL is planned again when something that its plan depends on has changed
#

$session->ask(q{
	SET check_function_bodies = off;
	CREATE TABLE customer_plans (c int, l rl_limits);
	INSERT INTO customer_plans VALUES (1, '1000/1h');
	CREATE VIEW customer_view AS SELECT 1 AS c, '1000/1h'::rl_limits AS l;
	CREATE FUNCTION by_table(c int) RETURNS rl_limits LANGUAGE sql STABLE AS 'SELECT l FROM public.customer_plans p WHERE p.c = $1';
	CREATE FUNCTION by_view(c int) RETURNS rl_limits LANGUAGE sql STABLE AS 'SELECT l FROM public.customer_view p WHERE p.c = $1';
	CREATE TABLE stale (by text, c int);
	CREATE TRIGGER t BEFORE INSERT ON stale FOR EACH ROW WHEN (NEW.by = 'table') EXECUTE FUNCTION rl_enforce('stale:{c}', 'public.by_table({c})');
	CREATE TRIGGER v BEFORE INSERT ON stale FOR EACH ROW WHEN (NEW.by = 'view') EXECUTE FUNCTION rl_enforce('stale:{c}', 'public.by_view({c})')});
is($session->error, '', 'stale plans: the tables are made');
foreach my $case (
	[ 'a view is replaced', 'view', q{CREATE OR REPLACE VIEW public.customer_view AS SELECT 1 AS c, 'blocked'::rl_limits AS l}, 'PT403' ],
	[ 'a table is made again', 'table', q{DROP TABLE customer_plans; CREATE TABLE public.customer_plans AS SELECT 1 AS c, 'blocked'::rl_limits AS l}, 'PT403' ],
	[ 'the type of a column is changed', 'table', q{ALTER TABLE customer_plans ALTER l TYPE int USING 1}, '42P13' ],
	[ 'an index is added', 'table', q{ALTER TABLE customer_plans ADD UNIQUE (c)}, '00000' ])
{
	my ($what, $by, $change, $state) = @$case;

	$session->ends("BEGIN; INSERT INTO stale VALUES ('$by', 1)", "stale plans: $what: a row before");
	$session->ends("$change; INSERT INTO stale VALUES ('$by', 1)", "stale plans: $what: a row after", $state);
	$session->ask('ROLLBACK');
}
$session->ask('DROP TABLE stale');

#
# A statement that its own charges stop can never pass: PT413
#

$session->ask(q{
	CREATE TABLE many ();
	CREATE TABLE audit (c text);
	CREATE TRIGGER enforce BEFORE INSERT ON audit FOR EACH ROW EXECUTE FUNCTION rl_enforce('audit:{c}', '1000/1h');
	CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO audit VALUES (NEW.c); RETURN NEW; END';
	CREATE FUNCTION limits_of(c text) RETURNS rl_limits LANGUAGE sql RETURN 'fixed_window 5/1h from_first'::rl_limits;
	CREATE FUNCTION limits_by(n int) RETURNS rl_limits LANGUAGE sql RETURN 'fixed_window 5/1h from_first'::rl_limits;
	CREATE PROCEDURE commits() LANGUAGE plpgsql AS $$BEGIN FOR i IN 1 .. 4 LOOP INSERT INTO many VALUES ('x'); COMMIT; END LOOP; END$$});
my $keys = 0;

# Makes a table with a trigger; returns its key's prefix.
sub limit_rows
{
	my ($limits, %how) = @_;
	my ($kind, $each, $option) = ($how{kind} || 'TRIGGER t BEFORE INSERT', $how{each} || 'FOR EACH ROW', $how{option} || '');
	my $key = 'k' . ++$keys;

	$session->ask("DROP TABLE many; CREATE TABLE many (c text, n int DEFAULT 1);
		CREATE $kind ON many $each EXECUTE FUNCTION rl_enforce('$key:{c}', '$limits'$option)");
	is($session->error, '', "a trigger with $limits") or die;
	return $key;
}

# Checks that a command fails as too large, after so many units of five were charged.
sub too_large
{
	my ($command, $what, $key, $before, $by) = @_;

	$by ||= 'statement';
	return $session->fails($command, $what, 'PT413', qr/^$by takes more than rate limit ".*" ever allows$/,
		qr/^Key "$key:x" never has more than 5\. The $by charged $before before\./);
}

my $six = q{INSERT INTO many SELECT 'x' FROM generate_series(1, 6)};
my $loop = q{DO $loop$BEGIN FOR i IN 1 .. 6 LOOP INSERT INTO many VALUES ('x'); END LOOP; END$loop$};
foreach my $limits ('5/10h', 'token_bucket 5/10h', 'fixed_window 5/1h from_first', 'fixed_window 5/year', 'sliding_window 5/1h',
	'sliding_log 5/1h', '100/1s, sliding_log 5/1h, 1000/1h')
{
	my $key = limit_rows($limits);

	too_large($six, "one statement, $limits", $key, 5);
	$session->fails($six, 'and again: another client could have charged the units', 'PT429', qr/exceeded$/);
	limit_rows($limits);
	$session->fails($loop, "six statements in a loop, $limits", 'PT429', qr/exceeded$/);
}
too_large($six, 'AFTER ROW', limit_rows('5/10h', kind => 'TRIGGER t AFTER INSERT'), 5);
too_large($six, 'limits by a function', limit_rows('public.limits_of({c})'), 5);
my $key = limit_rows('5/10h', option => q{, 'quota={n}'});
too_large(q{INSERT INTO many VALUES ('x', 3), ('y', 5), ('x', 3)}, 'a quota', $key, 3);
$session->fails(q{INSERT INTO many VALUES ('z', 6)}, 'a quota above the capacity', 'PT413', qr/^action of 6 is larger/, qr/^Key "$key:z" never has more than 5\.$/);
$key = limit_rows('5/10h', option => q{, 'second', 'token_bucket 100/1h'});
too_large($six, 'two keys', $key, 5);
$key = limit_rows('5/10h', kind => 'CONSTRAINT TRIGGER t AFTER INSERT', each => 'DEFERRABLE INITIALLY DEFERRED FOR EACH ROW');
$session->ask("BEGIN; $loop; COMMIT");
like($session->error, qr/PT413.*\nDETAIL:  Key "$key:x" never has more than 5\. The statement charged 5 before\./, 'a commit with deferred triggers');
limit_rows('fixed_window 3/1h from_first', kind => 'CONSTRAINT TRIGGER t AFTER INSERT', each => 'DEFERRABLE INITIALLY DEFERRED FOR EACH ROW');
$session->ask('CALL commits()');
like($session->error, qr/PT429/, 'the commits of a procedure are statements of their own');
is($session->ask('SELECT count(*) FROM many'), 3, 'three are allowed');
my %statement = (kind => 'TRIGGER t AFTER INSERT', each => 'REFERENCING NEW TABLE AS added FOR EACH STATEMENT');
$key = limit_rows('public.limits_by({n})', %statement);
too_large(q{INSERT INTO many SELECT 'x', n FROM generate_series(1, 6) n}, 'STATEMENT, a key in several groups', $key, 5);
$key = limit_rows('5/10h', %statement, option => ", 'k@{[ $keys + 1 ]}:{c}', '5/10h'");
too_large(q{INSERT INTO many SELECT 'x' FROM generate_series(1, 3)}, 'STATEMENT, two equal pairs', $key, 3);
$key = limit_rows('5/10h');
$session->ask('CREATE TRIGGER a BEFORE INSERT ON many FOR EACH ROW EXECUTE FUNCTION audit()');
too_large($six, 'another trigger runs statements in between', $key, 5);
$key = limit_rows('5/10h');
too_large(q{INSERT INTO many SELECT CASE WHEN n BETWEEN 6 AND 2000 THEN n::text ELSE 'x' END FROM generate_series(1, 2001) n},
	'2,000 other keys in between', $key, 5);
$session->set(debug_now => '1700000000000000');
limit_rows('fixed_window 5/10s');
$session->fails(q{INSERT INTO many SELECT left(set_config('ratelimit.debug_now', (1700000000000000 + least(n / 4, 1) * 10000000)::text, false), 0) || 'x'
	FROM generate_series(1, 9) n}, 'a charge of an earlier window does not count', 'PT429', qr/exceeded$/);
$session->set(debug_now => '1700000000000000');
$key = limit_rows('5/10s');
$session->fails(q{INSERT INTO many SELECT left(set_config('ratelimit.debug_now', (1700000000000000 + n / 6 * 1000000)::text, false), 0) || 'x'
	FROM generate_series(1, 6) n}, 'half of a unit was replenished: not enough', 'PT413', qr/^statement takes more/);
$session->set(debug_now => undef);

# With refund_on_abort, the charges of the transaction count.
foreach my $limits ('5/10h refund_on_abort', 'sliding_log 5/1h refund_on_abort', 'fixed_window 5/1h from_first refund_on_abort', 'concurrent 5/1h')
{
	too_large($loop, "one transaction, $limits", limit_rows($limits), 5, 'transaction');
}
$key = limit_rows('5/10h refund_on_abort', kind => 'TRIGGER t AFTER INSERT', each => 'REFERENCING NEW TABLE AS rows FOR EACH STATEMENT');
$session->ask(q{BEGIN; INSERT INTO many VALUES ('x'), ('x'), ('x')});
too_large(q{INSERT INTO many VALUES ('x'), ('x'), ('x'), ('y')}, 'FOR EACH STATEMENT', $key, 3, 'transaction');
$session->ask('ROLLBACK');
limit_rows('sliding_log 5/1h refund_on_abort');
$session->ask(q{BEGIN; SAVEPOINT s; INSERT INTO many VALUES ('x'), ('x'), ('x'); ROLLBACK TO s; INSERT INTO many VALUES ('x'), ('x'), ('x')});
is($session->ask('SELECT count(*) FROM many'), 3, 'the charges of a savepoint that was rolled back do not count');
$session->ask('ROLLBACK; DROP TABLE many, audit; DROP FUNCTION audit');

# Maintenance that moves rows to another partition inserts them, as pg_partman does.
my $move = 'INSERT INTO moved SELECT * FROM rest';
$session->ask(q{
	CREATE TABLE moved (k int, u text) PARTITION BY LIST (k);
	CREATE TABLE moved_1 PARTITION OF moved FOR VALUES IN (1);
	CREATE TABLE rest AS SELECT 1 AS k, 'u' AS u FROM generate_series(1, 2);
	CREATE TRIGGER t BEFORE INSERT ON moved FOR EACH ROW EXECUTE FUNCTION rl_enforce('moved:{u}', '2/1h');
	INSERT INTO moved VALUES (1, 'u')});
$session->fails($move, 'moved rows take quota', 'PT429', qr/^rate limit "throttle 2\/1h" exceeded/);
$session->ask("BEGIN; SET LOCAL ratelimit.mode = 'off'; $move; COMMIT");
is($session->ask('SELECT count(*) FROM moved'), 3, 'and none under ratelimit.mode = off');
$session->ask('DROP TABLE moved, rest');

#
# Memory
#

my $other = session($node);
$other->ask(q{
	CREATE TABLE parts (k int, u text) PARTITION BY LIST (k);
	DO $$BEGIN FOR i IN 1 .. 50 LOOP EXECUTE format('CREATE TABLE parts%s PARTITION OF parts FOR VALUES IN (%s)', i, i); END LOOP; END$$;
	CREATE TRIGGER t BEFORE INSERT ON parts FOR EACH ROW EXECUTE FUNCTION rl_enforce('parts:{u}', '1000000/1s');
	INSERT INTO parts SELECT n, 'u' FROM generate_series(1, 50) n});
my ($rules, $bytes) = split /\|/, $other->ask(q{SELECT count(*), sum(total_bytes) FROM pg_backend_memory_contexts WHERE name = 'rate-limit rule'});
is($rules, 50, 'a rule for each partition');
cmp_ok($bytes / $rules, '<=', 2048, "a rule takes @{[ int $bytes / $rules ]} bytes");
$other->ask('DROP TABLE parts');
$other->ask(q{
	CREATE TABLE long (c int, body text);
	CREATE FUNCTION used(body text) RETURNS rl_limits LANGUAGE plpgsql AS $$
		DECLARE kb int;
		BEGIN
			SELECT sum(total_bytes) / 1024 INTO kb FROM pg_backend_memory_contexts WHERE name IN ('rate-limit groups', 'TupleSort main', 'Caller tuples');
			PERFORM set_config('used.kb', greatest(kb, current_setting('used.kb')::int)::text, false),
				set_config('used.calls', (current_setting('used.calls')::int + 1)::text, false);
			RETURN '2/1h';
		END$$;
	SET used.kb = 0;
	SET used.calls = 0;
	SET work_mem = '1MB';
	CREATE TRIGGER t AFTER INSERT ON long REFERENCING NEW TABLE AS n FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('long:{c}', 'public.used({body})');
	INSERT INTO long SELECT n % 200, (n % 200) || repeat('x', 100000) FROM generate_series(1, 400) n});
is($other->error, '', 'groups with long arguments');
is($other->ask(q{SELECT current_setting('used.calls')}), 200, 'the function is called once for each group');
is($session->left('2/1h', 'long:0', 'long:199'), '0 0', 'the quotas of each group are summed');
my $kb = $other->ask(q{SELECT current_setting('used.kb')});
cmp_ok($kb, '<', 8 * 1024, "20 MB of arguments take $kb kB with work_mem = 1 MB");
$other->ask('DROP TABLE long');
$other->quit;

$session->quit;
$node->stop;
$redis->stop;
done_testing();
