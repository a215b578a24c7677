# Limits that depend on the customer: unlimited and blocked, and limits by function
# in triggers.
use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisMonitor;
use RedisServer;
use Test::More;

my $redis = RedisServer->new->start;
my $node = shared_node($redis, 'ratelimit.denial_cache = off');
my $session = session($node);
my $monitor = RedisMonitor->new($redis);

# Returns the commands that Redis has got since the last time, without those of connecting.
sub asked { return scalar grep { uc $_->[0] !~ /^(?:AUTH|SELECT|HELLO|CLIENT)$/ } $monitor->commands; }

#
# unlimited and blocked: Redis is not asked, and the calls are counted
#

$session->ask(q{
	CREATE TABLE actions (customer text);
	CREATE TRIGGER enforce BEFORE INSERT ON actions FOR EACH ROW EXECUTE FUNCTION rl_enforce('row:{customer}', 'unlimited');
	CREATE TABLE batches (customer text);
	CREATE TRIGGER enforce AFTER INSERT ON batches REFERENCING NEW TABLE AS new FOR EACH STATEMENT
		EXECUTE FUNCTION rl_enforce('batch:{customer}', 'blocked')});
is($session->error, '', 'the tables are made');
$session->ask(q{SELECT rl_check('first', '5/10s')});
cmp_ok(asked(), '>', 0, 'MONITOR shows a call under a limit');
foreach my $limits (qw(unlimited blocked))
{
	foreach my $call ("check('a:1', '$limits')", "check_each('a:1', '$limits')", "check_many('{a:1,a:2}', '$limits')", "allow('a:1', '$limits')",
		"wait('a:1', '$limits')", "peek('a:1', '$limits')", "refund('a:1', '$limits', 1)", "reset('a:1', '$limits')")
	{
		$session->ask("SELECT rl_$call");
		is($session->error, '', "rl_$call");
	}
	$session->attempt("SELECT rl_enforce('a:1', '$limits')");
}
$session->ask(q{INSERT INTO actions SELECT 'c' || n FROM generate_series(1, 10) n});
is($session->error, '', 'unlimited: a trigger');
$session->fails(q{INSERT INTO batches SELECT 'c' || n FROM generate_series(1, 10) n}, 'blocked: a trigger', 'PT403', qr/^rate limit "blocked" forbids the action$/);
is(asked(), 0, 'MONITOR shows no command for unlimited and blocked');
is($session->ask(q{SELECT limits, scope, allowed, denied, from_local, round_trips FROM rl_stat WHERE scope <> 'first' ORDER BY limits COLLATE "C", scope}),
	"blocked|a|0|7|0|0\nblocked|batch|0|10|0|0\nunlimited|a|7|0|0|0\nunlimited|row|10|0|0|0", 'rl_stat counts them');
is($session->ask('SELECT count(*) FROM rl_denied'), 0, 'rl_denied does not show them');
$session->ask('SELECT rl_stat_reset()');
$session->ask(q{SELECT rl_allow('a:1', 'unlimited')});
is($session->ask('SELECT limits, allowed, denied FROM rl_stat'), 'unlimited|1|0', 'rl_stat: after a reset');
$session->set(mode => 'shadow');
$session->ask(q{SELECT rl_allow('a:1', 'blocked')});
is($session->ask(q{SELECT shadow_denied, denied FROM rl_stat WHERE limits = 'blocked'}), '1|0', 'rl_stat: mode shadow');
like(new_log($node), qr/LOG:  rate limit "blocked" would refuse key "a:1"/, 'mode shadow: logged');
$session->set(mode => undef);

$redis->stop;
foreach my $policy (qw(error allow deny local))
{
	$session->set(on_error => $policy);
	is($session->ask(q{SELECT source FROM (VALUES (1, 'unlimited'), (2, 'blocked')) v (n, limits), rl_check('a:1', limits) ORDER BY n}),
		"unlimited\nblocked", "Redis is down, on_error = $policy: the answers are the same");
}
$session->set(on_error => undef);
$redis->start;

# Refusals in the server's log.
foreach my $case ([ none => 0 ], [ all => 5 ], [ sampled => 1 ])
{
	my ($setting, $lines) = @$case;

	$session->set(log_refusals => $setting);
	new_log($node);
	$session->ask(q{SELECT rl_enforce('flood', 'blocked')}) foreach 1 .. 5;
	my $logged = count_of(qr/ERROR:  rate limit "blocked" forbids/, new_log($node));
	ok($setting eq 'sampled' ? $logged >= 1 && $logged < 5 : $logged == $lines, "log_refusals = $setting: $logged of 5 refusals are logged");
}
$session->set(log_refusals => undef);

done_testing();
