# Eight backends at the same time: on one key exactly the capacity is allowed, and
# while the scripts are flushed ten times a second the promise is kept and reached.
use RatelimitTest;
use Time::HiRes qw(sleep time);

my $redis = RedisServer->new->start;
my $node = new_node($redis);

$node->safe_psql('postgres', q{
	CREATE UNLOGGED TABLE taken (run text, quota bigint, allowed boolean,
		remaining bigint, retry_after double precision, source text);
});

# One action a day: nothing is replenished while the test runs.
my $capacity = 137;
finish_clients(start_clients($node, 'burst', qq{
	INSERT INTO taken SELECT 'burst', 1, allowed, remaining, retry_after, source
	FROM rl_throttle('burst', $capacity, 1, 86400);
}, '-t', '50'));
is($node->safe_psql('postgres', q{
		SELECT count(*), count(*) FILTER (WHERE allowed), string_agg(DISTINCT source, ',')
		FROM taken WHERE run = 'burst'}),
	"400|$capacity|redis", 'of 400 calls in a burst exactly the capacity is allowed');
is($node->safe_psql('postgres', q{
		SELECT count(DISTINCT remaining), min(remaining), max(remaining)
		FROM taken WHERE run = 'burst' AND allowed}),
	"$capacity|0|" . ($capacity - 1), 'each allowed call took another unit');
is($node->safe_psql('postgres', q{
		SELECT count(*) FROM taken WHERE run = 'burst' AND NOT allowed
			AND (remaining <> 0 OR retry_after IS NULL
				OR retry_after NOT BETWEEN 86400 - 3600 AND 86400)}),
	'0', 'each refused call returns a wait of a day');

# Quotas of one to seven: the quota that was granted is the quota that is used.
finish_clients(start_clients($node, 'quotas', q{
	\set quota random(1, 7)
	INSERT INTO taken SELECT 'quotas', :quota, allowed, remaining, retry_after, source
	FROM rl_throttle('quotas', 500, 1, 86400, :quota);
}, '-t', '60'));
my ($granted, $least_refused) = split /\|/, $node->safe_psql('postgres', q{
	SELECT coalesce(sum(quota) FILTER (WHERE allowed), 0), coalesce(min(quota) FILTER (WHERE NOT allowed), 0)
	FROM taken WHERE run = 'quotas'});
my $left = $node->safe_psql('postgres',
	q{SELECT remaining FROM rl_peek('quotas', '1/1d burst 500', 0)});
is($granted + $left, 500, "granted $granted and $left left make the capacity");
cmp_ok($least_refused, '>', $left, 'no call was refused whose quota is free');

# Two limits decide together: both are charged, or none.
finish_clients(start_clients($node, 'both', q{
	INSERT INTO taken SELECT 'both', 1, allowed, remaining, retry_after, source
	FROM rl_check('both', '1/1d burst 50, 1/2d burst 80');
}, '-t', '20'));
is($node->safe_psql('postgres',
		q{SELECT count(*) FILTER (WHERE allowed), count(*) FROM taken WHERE run = 'both'}),
	'50|160', 'two limits allow what the smaller one allows');
is($node->safe_psql('postgres',
		q{SELECT string_agg(remaining::text, ',' ORDER BY capacity)
			FROM rl_peek('both', '1/1d burst 50, 1/2d burst 80', 0)}),
	'0,30', 'a refusal by one limit charges neither');

# Some seconds at 100 a second after a burst of 200.  At the first refusal the
# burst is used up.  Each backend continues until it is refused, so at the last
# refusal less than one unit is free.  Before the first refusal the limit may have
# been unused for moments, while the backends started.
my ($burst, $rate, $seconds) = (200, 100, is_long() ? 5 : 2);
$node->safe_psql('postgres', qq{
	CREATE UNLOGGED TABLE hammered (calls bigint, allowed bigint, other bigint,
		first_refusal timestamptz, last_refusal timestamptz);
	CREATE FUNCTION hammer() RETURNS void LANGUAGE plpgsql AS \$\$
	DECLARE
		d rl_decision;
		calls bigint := 0;
		allowed bigint := 0;
		other bigint := 0;
		first_refusal timestamptz;
		began timestamptz := clock_timestamp();
		asked timestamptz;
	BEGIN
		LOOP
			asked := clock_timestamp();
			d := rl_throttle('hammer', $burst, $rate, 1);
			IF NOT d.allowed THEN
				first_refusal := coalesce(first_refusal, clock_timestamp());
			END IF;
			calls := calls + 1;
			allowed := allowed + d.allowed::int;
			other := other + (d.source <> 'redis')::int;
			EXIT WHEN NOT d.allowed AND asked > began + interval '$seconds s';
		END LOOP;
		INSERT INTO hammered VALUES (calls, allowed, other, first_refusal, asked);
	END \$\$;
});

my $began = time;
my $run = start_clients($node, 'hammer', 'SELECT hammer();', '-t', '1');
my ($flushes, @ttl_problems) = (0);
while (still_runs($run->{handle}))
{
	$redis->cli('SCRIPT', 'FLUSH');
	$flushes++;
	push @ttl_problems, ttl_problems($redis);
	sleep max(0, $began + 0.1 * $flushes - time);
}
finish_clients($run);
my $took = time - $began;

my ($clients, $calls, $allowed, $other, $span) = split /\|/, $node->safe_psql('postgres', q{
	SELECT count(*), sum(calls), sum(allowed), sum(other),
		extract(epoch FROM max(last_refusal) - min(first_refusal)) FROM hammered});
my %errors = $redis->info('errorstats');
note "$calls calls, $allowed allowed in $span s, $flushes times SCRIPT FLUSH, ",
  "NOSCRIPT: ", $errors{errorstat_NOSCRIPT} || 'none';
is($clients, 8, 'eight backends completed');
is($other, 0, 'the store made every decision');
cmp_ok($flushes, '>=', $seconds, 'the scripts were flushed repeatedly');
like($errors{errorstat_NOSCRIPT} || '', qr/count=[1-9]/, 'Redis replied NOSCRIPT');
cmp_ok($calls, '>', $burst + $rate * $took, 'the clients asked for more than the limit gives');
cmp_ok($allowed, '<=', $burst + $rate * $took, 'the promise was kept');
cmp_ok($allowed, '>=', $burst + $rate * $span - 2, 'the promise was reached');
is_deeply(\@ttl_problems, [], 'each key had the right time to live at all times');

done_testing();
