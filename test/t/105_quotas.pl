# docs/quotas.md: eight clients that race find each threshold of a month exactly once.
#
# RATELIMIT_CALLS is the number of calls of a month, of each of 21 customers.
#
# Runs once in a suite: PostgreSQL runs the functions of the page.
use RatelimitTest;
use DocPage;

my ($rounds, $calls) = (20, $ENV{RATELIMIT_CALLS} || 120);
my $redis = RedisServer->new->start;
my $node = shared_node($redis);
my $script = PostgreSQL::Test::Utils::tempdir . '/calls.sql';

$node->psql('postgres', join('', map { $_->{text} } DocPage->new("$FindBin::RealBin/../../docs/quotas.md")->commands), on_error_stop => 0);

# The trigger also sees rows that are not inserted, because another session has done so.
$node->safe_psql('postgres', qq{
	DELETE FROM notices;
	INSERT INTO plans VALUES ('race', 1000000, $calls);
	INSERT INTO customers (id, plan) SELECT 100 + n, 'race' FROM generate_series(1, $rounds + 1) n;
	CREATE TABLE seen (customer bigint, percent int);
	CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN
		INSERT INTO seen VALUES (NEW.customer, NEW.percent);
		RETURN NEW;
	END \$\$;
	CREATE TRIGGER see BEFORE INSERT ON notices FOR EACH ROW EXECUTE FUNCTION see()});

# Lets eight clients call for the customers from this one on, each more often than the plan allows, and perhaps with the job.
sub race
{
	my ($first, $customers, $job) = @_;
	my $call = 'SELECT call_noted(:customer);' . ($job ? ' SELECT count(*) FROM months(), note(customer, 0, used, capacity);' : '') . "\n";

	unlink $script;
	append_to_file($script, "\\set customer :customer + 1\n" . $call x ($calls / 8 + 5));
	return $node->command_ok([ 'pgbench', '-n', '-c', 8, '-j', 2, '-D', 'customer=' . ($first - 1), '-t', $customers, '-f', $script,
		$node->connstr('postgres') ], "customers from $first on");
}

sub rows { my ($sql) = @_; return $node->safe_psql('postgres', $sql); }

race(101, $rounds);
is(rows(qq{SELECT percent, count(*), count(DISTINCT customer) FROM seen GROUP BY percent ORDER BY percent}),
	"80|$rounds|$rounds\n100|$rounds|$rounds", 'exactly one call crosses each threshold');
race(101 + $rounds, 1, 1);
is(rows(qq{SELECT percent, count(*) FROM notices WHERE customer > 100 AND customer <= 101 + $rounds GROUP BY percent ORDER BY percent}),
	'80|' . ($rounds + 1) . "\n100|" . ($rounds + 1), 'each notice is there once, also if the job looks');
is(rows(qq{SELECT DISTINCT used FROM months() WHERE customer > 100 AND customer <= 101 + $rounds}), $calls, 'no customer has more than the plan');

done_testing();
