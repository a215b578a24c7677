# The smallest rule for a user of Redis, as docs/operations.md gives it: every function
# works under it, none of its words can be left out, and keys with another
# prefix are out of its reach.
use strict;
use warnings FATAL => 'all';

use FindBin;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisServer qw(documented_user);
use Test::More;

my ($user, $password, @rule) = documented_user();
my @commands = grep { /^\+/ } @rule;
is_deeply([ grep { !/^\+[a-z]+$/ } @rule ], [ 'on', ">$password", '~rl:*' ],
	'the documented rule: one prefix, and single commands');

my $redis = RedisServer->new(password => 'sesame')->start;
my $node = preloaded_node($redis, 'track_functions = all', 'ratelimit.denial_cache = off', 'ratelimit.retry_interval = 0',
	"ratelimit.redis_passfile = '" . password_file($password) . "'",
	"ratelimit.redis_url = '" . $redis->url(user => $user, tcp => 1) . "'");
$node->safe_psql('postgres', q{
	CREATE TABLE orders (customer bigint);
	CREATE TRIGGER enforce BEFORE INSERT ON orders
		FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '3/1d, sliding_log 5/1h');
	CREATE FUNCTION take_back() RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM rl_check('back', 'sliding_log 9/1h refund_on_abort');
		BEGIN
			PERFORM rl_check('back', 'sliding_log 9/1h refund_on_abort', 2);
			RAISE 'back';
		EXCEPTION WHEN raise_exception THEN
			-- What Redis does not permit then is only logged.
			IF (SELECT remaining FROM rl_peek('back', 'sliding_log 9/1h', 0)) <> 8 THEN
				RAISE 'not given back for want of a permission' USING ERRCODE = '08P01';
			END IF;
			RETURN 'given back';
		END;
	END $$;
});
my $session = session($node);

# All that makes Redis run another command: first and later actions, refusals,
# bans, entries split by a refund, things that are forgotten.
my $five = '3/1h, token_bucket 3/1h, fixed_window 3/1h, sliding_window 3/1h, sliding_log 3/1h';
my $log = 'sliding_log 4/1h';
my @calls = (
	(map { ("SELECT $_", "SELECT $_") } q{rl_throttle('k', 1, 1, 3600)}, q{rl_token_bucket('k', 1, 1, 3600)},
		q{rl_fixed_window('k', 1, 3600)}, q{rl_sliding_window('k', 1, 3600, 60)}, q{rl_sliding_log('k', 1, 3600)}),
	"SELECT rl_check('five', '$five', 2)", "SELECT rl_check('five', '$five', 2)",
	(map { ("SELECT rl_check('$_', '$_ 1/1h ban 1h after 2')") x 3 }
		qw(throttle token_bucket fixed_window sliding_window sliding_log)),
	(map { ("SELECT rl_check('$_ denied', '$_ 4/1h count_denied', 3)") x 2 }
		qw(fixed_window sliding_window sliding_log)),
	("SELECT rl_check('log', '$log')") x 4, "SELECT rl_check('log', '$log', 3)",
	"SELECT rl_refund('log', '$log', 2)", "SELECT rl_check('log', '$log', 2)",
	"SELECT rl_refund('log', '$log', 3)", "SELECT rl_refund('five', '$five', 1)",
	(map { "SELECT $_('$_', '$five')" } qw(rl_check_each rl_allow rl_enforce rl_wait rl_peek)),
	"SELECT count(*) FROM rl_check_many('{a,b,a}', '$five')", 'SELECT take_back()',
	'INSERT INTO orders VALUES (42), (42)', q{SELECT problem FROM rl_triggers},
	q{SELECT rl_ban(rl_key('k', 1), 3600)}, q{SELECT rl_unban('k:1')}, q{SELECT rl_unban('k:1')},
	"SELECT rl_reset('five', '$five')", q{SELECT rl_reset('log')}, q{SELECT rl_reset('log')},
	(map { "SELECT count(*) FROM $_" } qw(rl_stat rl_denied)), 'SELECT rl_stat_reset()');

# The user has this rule and no other, Redis knows no key and no script.
sub with_rule
{
	my (@words) = @_;

	$redis->cli('ACL', 'DELUSER', $user);
	$redis->cli('ACL', 'SETUSER', $user, @words);
	$redis->cli('FLUSHALL');
	$redis->cli('SCRIPT', 'FLUSH');
	return;
}

# What the attempts that ended in an error say.
sub failures
{
	return map { "$_->{state} $_->{message}: $_->{detail}" }
	  grep { $_->{state} ne '00000' } map { $session->attempt($_) } @calls;
}

with_rule(@rule);
is_deeply([ failures() ], [], 'every function works under the rule');
like($redis->cli('CLIENT', 'LIST'), qr/user=\Q$user\E /, 'it is that user');
like($session->ask(q{SELECT version, error IS NULL FROM rl_status()}), qr/\d+\.\d+.*\|t$/, 'rl_status too');
$session->ask('SELECT pg_stat_force_next_flush()');
is($node->safe_psql('postgres', q{
		SELECT string_agg(oid::regprocedure::text, ', ' ORDER BY oid)
		FROM pg_proc LEFT JOIN pg_stat_user_functions s ON s.funcid = oid
		WHERE s.calls IS NULL AND proname NOT LIKE 'rl\_limits%' AND proname <> 'rl_simulate'
			AND oid IN (} . members('pg_proc') . ')'),
	'', 'every function was called, but for the type\'s and rl_simulate, which ask no Redis');

foreach my $left_out (@rule)
{
	with_rule(grep { $_ ne $left_out } @rule);
	my @failures = failures();

	cmp_ok(scalar @failures, '>', 0, "nothing less will do: without $left_out something fails");
	is_deeply([ grep { !/^(?:08P01 .*(?:can't run|permission)|28P01 )/ } @failures ], [],
		"without $left_out: as a refusal of Redis, no verdict");
}

#
# Out of reach
#

with_rule(@rule);
foreach my $prefix ('other:', 'rl', '')
{
	$session->set(key_prefix => $prefix);
	foreach my $call (q{rl_throttle('k', 1, 1, 3600)}, "rl_check('k', '$five')", q{rl_ban('k', 3600)}, q{rl_reset('k')})
	{
		$session->fails("SELECT $call", "the prefix '$prefix': $call", '08P01', qr/NOPERM .* key/);
	}
}
is_deeply($redis->cli('KEYS', '*'), [], 'nothing was written');
$session->set(key_prefix => undef);
is($session->attempt($calls[0])->{state}, '00000', 'with its own prefix it goes on');

# The page says when one more is needed.
like(slurp_file("$FindBin::RealBin/../../docs/operations.md"), qr/`\+select`/, 'the page names +select');
$session->set(redis_url => $redis->url(user => $user, db => 1));
is($session->attempt($calls[0])->{state}, '08P01', 'another database than 0 needs +select');
with_rule(@rule, '+select');
is_deeply([ failures() ], [], 'and no more');

done_testing();
