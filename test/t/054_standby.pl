# A hot standby and read-only transactions: every function works there, and the
# standby shares its limits with its primary. Limits in policies and in views.
use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisServer;
use Test::More;

my $redis = RedisServer->new->start;
my $primary = preloaded_node($redis, 'wal_level = replica', 'max_wal_senders = 4',
	'hot_standby = on');
$primary->append_conf('pg_hba.conf', 'local replication all trust');
$primary->reload;
$primary->safe_psql('postgres', q{
	CREATE TABLE orders (customer int, items int);
	INSERT INTO orders SELECT i % 3, 1 FROM generate_series(1, 30) i;
	CREATE TABLE notes (id int PRIMARY KEY, owner text, body text);
	INSERT INTO notes SELECT i, CASE WHEN i % 2 = 0 THEN 'ann' ELSE 'bob' END, 'note ' || i FROM generate_series(1, 10) i;
	CREATE ROLE ann LOGIN;
	CREATE ROLE bob LOGIN;
	GRANT SELECT, INSERT ON notes TO ann, bob;
	-- As docs/recipes.md has it: key and limits are fixed, and who calls is the session's matter.
	CREATE FUNCTION may_read() RETURNS boolean LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = public, pg_temp
		AS $$ SELECT rl_allow(rl_key('read', session_user), '100/1h') $$;
	CREATE FUNCTION may_post() RETURNS boolean LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = public, pg_temp
		AS $$ SELECT rl_allow(rl_key('post', session_user), '2/1h') $$;
	CREATE FUNCTION may_ask() RETURNS boolean LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = public, pg_temp
		AS $$ SELECT rl_allow(rl_key('ask', session_user), '3/1h') $$;
	ALTER TABLE notes ENABLE ROW LEVEL SECURITY;
	CREATE POLICY mine ON notes FOR SELECT USING (owner = session_user AND may_read());
	CREATE POLICY paced ON notes FOR INSERT WITH CHECK (owner = session_user AND may_post());
	CREATE VIEW each_note AS SELECT * FROM notes WHERE may_ask();
	CREATE VIEW once WITH (security_barrier) AS
		SELECT notes.* FROM (SELECT may_ask() AS ok OFFSET 0) gate JOIN notes ON gate.ok;
	GRANT SELECT ON each_note, once TO ann, bob;
});
$primary->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'base', has_streaming => 1);
$standby->start;
$primary->wait_for_catchup($standby, 'replay');

my $there = session($primary);
my $here = session($standby);
is($here->ask('SELECT pg_is_in_recovery()'), 't', 'a hot standby');

#
# What the one takes the other sees at once
#

$here->ask(q{BEGIN READ ONLY; SELECT rl_check('shared', '5/1h', 2)});
is($here->error, '', 'a read-only transaction on the standby takes quota');
is($there->left('5/1h', 'shared'), 3, 'which the primary sees before it ends');
$there->ask(q{BEGIN READ ONLY; SELECT rl_check('shared', '5/1h', 2); COMMIT});
is($there->error, '', 'one on the primary too');
is($here->ask(q{SELECT allowed, remaining FROM rl_check('shared', '5/1h', 2)}), 'f|1', 'which the standby sees');
$here->ask('ROLLBACK');
is($there->left('5/1h', 'shared'), 1, 'and what was charged stays charged');
$there->ask(q{SELECT rl_ban('shared', 60)});
is($here->ask(q{SELECT source FROM rl_check('shared', '5/1h')}), 'ban', 'a ban of the primary binds the standby');
$here->ask(q{SELECT rl_unban('shared')});
is($there->left('5/1h', 'shared'), 1, 'which may lift it');

#
# Every function that a user can call, in a read-only transaction
#

my %calls = (
	'rl_throttle'       => q{SELECT allowed FROM rl_throttle('f', 5, 5, 60)},
	'rl_token_bucket'   => q{SELECT allowed FROM rl_token_bucket('f', 5, 5, 60)},
	'rl_fixed_window'   => q{SELECT allowed FROM rl_fixed_window('f', 5, 60)},
	'rl_sliding_window' => q{SELECT allowed FROM rl_sliding_window('f', 5, 60, 1)},
	'rl_sliding_log'    => q{SELECT allowed FROM rl_sliding_log('f', 5, 60)},
	'rl_check'          => q{SELECT allowed FROM rl_check('f', '5/1h')},
	'rl_check_each'     => q{SELECT bool_and(allowed) FROM rl_check_each('f', '5/1h, fixed_window 9/1h')},
	'rl_check_many'     => q{SELECT bool_and(allowed) FROM rl_check_many('{f,g}', 'fixed_window 9/1h')},
	'rl_allow'          => q{SELECT rl_allow('f', '5/1h')},
	'rl_enforce'        => q{SELECT (rl_enforce('f', '5/1h')).allowed},
	'rl_wait'           => q{SELECT allowed FROM rl_wait('f', '5/1h')},
	'rl_peek'           => q{SELECT allowed FROM rl_peek('f', '5/1h', 0)},
	'rl_refund'         => q{SELECT rl_refund('f', '5/1h', 1) IS NOT NULL},
	'rl_ban'            => q{SELECT rl_ban('h', 60) IS NOT NULL},
	'rl_unban'          => q{SELECT rl_unban('h')},
	'rl_reset'          => q{SELECT rl_reset('f', '5/1h') AND rl_reset('f')},
	'rl_key'            => q{SELECT rl_key('a', 1) = 'a:1'},
	'rl_simulate'       => q{SELECT bool_and((d).allowed) FROM (SELECT rl_simulate('5/1h', now()) OVER () AS d) s},
	'rl_status'         => q{SELECT connected FROM rl_status()},
	'rl_stat'           => q{SELECT count(*) > 0 FROM rl_stat()},
	'rl_denied'         => q{SELECT count(*) >= 0 FROM rl_denied()},
	'rl_stat_reset'     => q{SELECT rl_stat_reset() IS NOT NULL},
	'rl_trigger_rule'   => q{SELECT count(*) = 0 FROM rl_triggers},
);
my @order = sort { ($a eq 'rl_unban') - ($b eq 'rl_unban') || ($a eq 'rl_reset') - ($b eq 'rl_reset') || $a cmp $b } keys %calls;
foreach my $function (@order)
{
	is($here->ask("BEGIN READ ONLY; $calls{$function}; COMMIT") . $here->error, 't', "$function on the standby");
}
# The type's own functions are no user's.
my $all = join ' ', sort keys %calls;
is($here->ask(q{SELECT string_agg(DISTINCT proname::text, ' ' ORDER BY proname::text) FROM pg_proc
	WHERE proname NOT LIKE 'rl\_limits%' AND prorettype <> 'rl_limits'::regtype AND oid IN (} . members('pg_proc') . ')'), $all, 'these are all there are');
is($here->ask(q{SELECT '5/1h'::rl_limits = '5/60min'::rl_limits, '5/1h'::varchar::rl_limits < '6/1h'}), 't|t', 'the type on the standby');

#
# refund_on_abort
#

my $refund = '9/1h refund_on_abort';
$_->ask('SET ratelimit.debug_now = 1700000000000000') foreach $here, $there;
$here->ask(qq{BEGIN READ ONLY; SELECT rl_check('r', '$refund', 4)});
is($there->left($refund, 'r'), 5, 'refund_on_abort on the standby: taken');
$here->ask(qq{SAVEPOINT s; SELECT rl_check('r', '$refund', 3); ROLLBACK TO s; SELECT rl_check('r2', '$refund')});
is($there->left($refund, 'r'), 5, 'a savepoint gives back');
$here->ask('ROLLBACK');
is($there->left($refund, 'r') . $there->left($refund, 'r2'), '99', 'and so does the rollback');
$here->ask(qq{BEGIN READ ONLY; SELECT rl_check('r', '$refund', 4); COMMIT});
is($there->left($refund, 'r'), 5, 'a commit keeps');
$_->ask('RESET ratelimit.debug_now') foreach $here, $there;

#
# A row-security policy: once for each row that is looked at
#

my %user = map { $_ => [ session($primary, 'postgres', $_), session($standby, 'postgres', $_) ] } qw(ann bob);

# How much a user has taken of a limit since the last time.  It is reset by the
# server that was asked: the other's denial cache believes in a refusal for up
# to a second more.
sub cost
{
	my ($where, $what, $user, $limits) = @_;

	return ($where ? $here : $there)->ask("SELECT capacity - remaining FROM rl_peek('$what:$user', '$limits', 0); SELECT rl_reset('$what:$user')") =~ /^(\d+)/ ? $1 : undef;
}

foreach my $where (0, 1)
{
	my $name = $where ? 'the standby' : 'the primary';
	my $ann = $user{ann}[$where];

	is($ann->ask('SELECT count(*) FROM notes'), 5, "policy: ann reads hers on $name");
	is(cost($where, 'read', 'ann', '100/1h'), 5, 'which costs one for each row that is hers');
	is($ann->ask('SELECT count(*) FROM notes WHERE id = 2'), 1, 'policy: one row by its index');
	is(cost($where, 'read', 'ann', '100/1h'), 1, 'costs one');
	is($ann->ask('SELECT count(*) FROM (SELECT * FROM notes LIMIT 2) s'), 2, 'policy: LIMIT');
	is(cost($where, 'read', 'ann', '100/1h'), 2, 'looks at no more rows than it has to');
	is($ann->ask(q{SELECT count(*) FROM notes WHERE body = 'note 4'}), 1, 'policy: a condition of the caller');
	# texteq is leak-proof, and so may go first.
	is(cost($where, 'read', 'ann', '100/1h'), 1, 'goes first if it is leak-proof and cheaper');
	is($ann->ask(q{SELECT count(*) FROM notes WHERE body LIKE '%4'}), 1, 'policy: a condition that might leak');
	is(cost($where, 'read', 'ann', '100/1h'), 5, 'waits for the policy');
}
$user{ann}[0]->ask(q{INSERT INTO notes VALUES (11, 'ann', 'x')});
is($user{ann}[0]->error, '', 'policy: a row is let in');
$user{ann}[0]->ask(q{INSERT INTO notes VALUES (12, 'ann', 'x'), (13, 'ann', 'x')});
is($user{ann}[0]->state, '42501', 'policy: the third is not');
is($there->left('2/1h', 'post:ann'), 0, 'and the second stays charged');
is($user{bob}[0]->ask(q{INSERT INTO notes VALUES (14, 'ann', 'x')}), '', 'policy: for another');
is($user{bob}[0]->state, '42501', 'is refused by the first condition');
is($there->left('2/1h', 'post:bob'), 2, 'and costs nothing');
$user{bob}[1]->ask(q{SELECT rl_check('x', '5/1h')});
is($user{bob}[1]->state, '42501', 'the function itself is not for everybody, on the standby too');

#
# A view: for each row, or once for a query
#

foreach my $where (0, 1)
{
	my $name = $where ? 'the standby' : 'the primary';
	my $bob = $user{bob}[$where];

	is($bob->ask('SELECT count(*) FROM each_note'), 3, "view: rows after the third are not seen on $name");
	is(cost($where, 'ask', 'bob', '3/1h'), 3, 'for each costs one');
	is($bob->ask('SELECT count(*) > 9 FROM once'), 't', 'view: asked in a subquery of its own');
	is(cost($where, 'ask', 'bob', '3/1h'), 1, 'it costs one for all rows');
	$bob->ask('SELECT count(*) FROM once') foreach 1 .. 3;
	is($bob->ask('SELECT count(*) FROM once'), 0, 'and then there are none');
	is(cost($where, 'ask', 'bob', '3/1h'), 3, 'when nothing is left');
}

#
# Promoted
#

$primary->stop;
$standby->promote;
await('the promotion', sub { $here->ask('SELECT pg_is_in_recovery()') eq 'f' });
$here->ask(q{CREATE TRIGGER enforce BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('shared', '5/1h');
	INSERT INTO orders VALUES (1, 1)});
is($here->error, '', 'promoted: a trigger');
is($here->left('5/1h', 'shared'), 0, 'goes on where the primary was');

done_testing();
