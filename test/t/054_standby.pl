# A hot standby and read-only transactions: every function works there, and the
# standby shares its limits with its primary.  Limits in policies and in views.
#
# Runs once in a suite: PostgreSQL is the standby.
use RatelimitTest;

my $redis = RedisServer->new->start;
my $primary = shared_node($redis, 'wal_level = replica', 'max_wal_senders = 4',
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
	-- As in docs/recipes.md: the limits are fixed, and the session's user is in the key.
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
is($here->ask('SELECT pg_is_in_recovery()'), 't', 'the standby is in recovery');

#
# Each server sees the other's charges at once
#

$here->ends(q{BEGIN READ ONLY; SELECT rl_check('shared', '5/1h', 2)}, 'a read-only transaction on the standby takes quota');
is($there->left('5/1h', 'shared'), 3, 'the primary sees the charge before the transaction ends');
$there->ends(q{BEGIN READ ONLY; SELECT rl_check('shared', '5/1h', 2); COMMIT}, 'a read-only transaction on the primary takes quota');
is($here->ask(q{SELECT allowed, remaining FROM rl_check('shared', '5/1h', 2)}), 'f|1', 'the standby sees the charge');
$here->ask('ROLLBACK');
is($there->left('5/1h', 'shared'), 1, 'the rollback refunds nothing');
$there->ask(q{SELECT rl_ban('shared', 60)});
is($here->ask(q{SELECT source FROM rl_check('shared', '5/1h')}), 'ban', 'a ban by the primary applies on the standby');
$here->ask(q{SELECT rl_unban('shared')});
is($there->left('5/1h', 'shared'), 1, 'rl_unban on the standby ends the ban');

# Each server has leases of its own.
$_->set(debug_now => '1700000000000000', debug_clock => '1000000') foreach $here, $there;
foreach my $session ($here, $there)
{
	$session->ask(q{SELECT count(rl_check('leased', 'fixed_window 1000/1h lease 50ms')) FROM generate_series(1, 17)});
	is($session->ask(q{SELECT source FROM rl_check('leased', 'fixed_window 1000/1h lease 50ms')}), 'lease', 'a server takes quota ahead');
}
is($there->ask(q{SELECT capacity - remaining FROM rl_peek('leased', 'fixed_window 1000/1h', 0)}), 66, 'both servers have charged the quota of their leases');
$_->set(debug_now => undef, debug_clock => undef) foreach $here, $there;

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
	'rl_check_all'      => q{SELECT bool_and(allowed) FROM rl_check_all('{all,both}', '{5/1h,5/1h}')},
	'rl_enforce_all'    => q{SELECT bool_and(allowed) FROM rl_enforce_all('{all,both}', '{5/1h,5/1h}')},
	'rl_allow'          => q{SELECT rl_allow('f', '5/1h')},
	'rl_enforce'        => q{SELECT (rl_enforce('f', '5/1h')).allowed},
	'rl_wait'           => q{SELECT allowed FROM rl_wait('f', '5/1h')},
	'rl_peek'           => q{SELECT allowed FROM rl_peek('f', '5/1h', 0)},
	'rl_refund'         => q{SELECT rl_refund('f', '5/1h', 1) IS NOT NULL},
	'rl_reserve'        => q{SELECT allowed FROM rl_reserve('reserved', '5/1h', 1, 'reserve')},
	'rl_extend'         => q{SELECT (rl_reserve('reserved', '5/1h', 1, 'extend')).allowed AND rl_extend('reserved', 'extend')},
	'rl_settle'         => q{SELECT (rl_reserve('reserved', '5/1h', 1, 'settle')).allowed AND rl_settle('reserved', 'settle', 1)},
	'rl_ban'            => q{SELECT rl_ban('h', 60) IS NOT NULL},
	'rl_unban'          => q{SELECT rl_unban('h')},
	'rl_reset'          => q{SELECT rl_reset('f', '5/1h') AND rl_reset('f')},
	'rl_key'            => q{SELECT rl_key('a', 1) = 'a:1'},
	'rl_network'        => q{SELECT rl_network('192.0.2.1', 24) = '192.0.2.0/24'},
	'rl_headers'        => q{SELECT rl_headers('n', '5/1h', rl_check('f', '5/1h', 0)) IS NOT NULL},
	'rl_bans'           => q{SELECT count(*) >= 0 FROM rl_bans()},
	'rl_bans_found'     => q{SELECT count(*) >= 0 FROM rl_bans_found('%')},
	'rl_inspect'        => q{SELECT count(*) > 0 FROM rl_inspect('f')},
	'rl_simulate'       => q{SELECT bool_and((d).allowed) FROM (SELECT rl_simulate('5/1h', now()) OVER () AS d) s},
	'rl_status'         => q{SELECT connected FROM rl_status()},
	'rl_stat'           => q{SELECT count(*) > 0 FROM rl_stat()},
	'rl_reserve_all'    => q{SELECT bool_and(allowed) FROM rl_reserve_all('{levels,narrow}', '{5/1h,5/1h}', '{1}', 'several')},
	'rl_extend_all'     => q{SELECT bool_and(allowed) FROM rl_reserve_all('{levels,narrow}', '{5/1h,5/1h}', '{1}', 'longer') HAVING rl_extend_all('{levels,narrow}', 'longer')},
	'rl_settle_all'     => q{SELECT bool_and(allowed) FROM rl_reserve_all('{levels,narrow}', '{5/1h,5/1h}', '{1}', 'paid') HAVING rl_settle_all('{levels,narrow}', 'paid', '{1}')},
	'rl_denied'         => q{SELECT count(*) >= 0 FROM rl_denied()},
	'rl_stat_reset'     => q{SELECT rl_stat_reset() IS NOT NULL},
	'rl_trigger_rule'   => q{SELECT count(*) = 0 FROM rl_triggers},
);
my @order = sort { ($a eq 'rl_unban') - ($b eq 'rl_unban') || ($a eq 'rl_reset') - ($b eq 'rl_reset') || $a cmp $b } keys %calls;
foreach my $function (@order)
{
	is($here->ask("BEGIN READ ONLY; $calls{$function}; COMMIT") . $here->error, 't', "$function on the standby");
}
# Users do not call the type's own functions.
my $all = join ' ', sort keys %calls;
is($here->ask(q{SELECT string_agg(DISTINCT proname::text, ' ' ORDER BY proname::text) FROM pg_proc
	WHERE proname NOT LIKE 'rl\_limits%' AND prorettype NOT IN ('rl_limits'::regtype, 'event_trigger'::regtype) AND oid IN (} . members('pg_proc') . ')'), $all, 'these are all functions');
is($here->ask(q{SELECT '5/1h'::rl_limits = '5/60min'::rl_limits, '5/1h'::varchar::rl_limits < '6/1h'}), 't|t', 'the type on the standby');

#
# refund_on_abort
#

my $refund = '9/1h refund_on_abort';
$_->ask('SET ratelimit.debug_now = 1700000000000000') foreach $here, $there;
$here->ask(qq{BEGIN READ ONLY; SELECT rl_check('r', '$refund', 4)});
is($there->left($refund, 'r'), 5, 'refund_on_abort on the standby: the limit is charged');
$here->ask(qq{SAVEPOINT s; SELECT rl_check('r', '$refund', 3); ROLLBACK TO s; SELECT rl_check('r2', '$refund')});
is($there->left($refund, 'r'), 5, 'refund_on_abort on the standby: the rollback of a savepoint refunds');
$here->ask('ROLLBACK');
is($there->left($refund, 'r') . $there->left($refund, 'r2'), '99', 'refund_on_abort on the standby: the rollback of the transaction refunds');
$here->ask(qq{BEGIN READ ONLY; SELECT rl_check('r', '$refund', 4); COMMIT});
is($there->left($refund, 'r'), 5, 'refund_on_abort on the standby: a commit keeps the charge');
$_->ask('RESET ratelimit.debug_now') foreach $here, $there;

#
# A row-security policy: a call for each row that is examined
#

my %user = map { $_ => [ session($primary, 'postgres', $_), session($standby, 'postgres', $_) ] } qw(ann bob);

# Returns how much quota a user has taken of a limit since the last time.  The server
# that was asked resets the limit, because the denial cache of the other server would
# keep a refusal for up to a second.
sub cost
{
	my ($where, $what, $user, $limits) = @_;

	return ($where ? $here : $there)->ask("SELECT capacity - remaining FROM rl_peek('$what:$user', '$limits', 0); SELECT rl_reset('$what:$user')") =~ /^(\d+)/ ? $1 : undef;
}

foreach my $where (0, 1)
{
	my $name = $where ? 'the standby' : 'the primary';
	my $ann = $user{ann}[$where];

	is($ann->ask('SELECT count(*) FROM notes'), 5, "policy: ann reads her rows on $name");
	is(cost($where, 'read', 'ann', '100/1h'), 5, "policy: the query costs a unit for each of her rows on $name");
	is($ann->ask('SELECT count(*) FROM notes WHERE id = 2'), 1, "policy: ann reads a row by its index on $name");
	is(cost($where, 'read', 'ann', '100/1h'), 1, "policy: a row by its index costs a unit on $name");
	is($ann->ask('SELECT count(*) FROM (SELECT * FROM notes LIMIT 2) s'), 2, "policy: ann reads with LIMIT on $name");
	is(cost($where, 'read', 'ann', '100/1h'), 2, "policy: LIMIT examines only the rows that it needs on $name");
	is($ann->ask(q{SELECT count(*) FROM notes WHERE body = 'note 4'}), 1, "policy: ann reads with a condition on $name");
	# texteq is leak-proof, so PostgreSQL may evaluate it first.
	is(cost($where, 'read', 'ann', '100/1h'), 1, "policy: a leak-proof and cheaper condition is evaluated before the policy on $name");
	is($ann->ask(q{SELECT count(*) FROM notes WHERE body LIKE '%4'}), 1, "policy: ann reads with a condition that is not leak-proof on $name");
	is(cost($where, 'read', 'ann', '100/1h'), 5, "policy: a condition that is not leak-proof is evaluated after the policy on $name");
}
$user{ann}[0]->ask(q{INSERT INTO notes VALUES (11, 'ann', 'x')});
is($user{ann}[0]->error, '', 'policy: a row is allowed');
$user{ann}[0]->ask(q{INSERT INTO notes VALUES (12, 'ann', 'x'), (13, 'ann', 'x')});
is($user{ann}[0]->state, '42501', 'policy: the third row is refused');
is($there->left('2/1h', 'post:ann'), 0, 'policy: the second row stays charged');
is($user{bob}[0]->ask(q{INSERT INTO notes VALUES (14, 'ann', 'x')}), '', 'policy: a row of another user has no output');
is($user{bob}[0]->state, '42501', 'policy: the first condition refuses a row of another user');
is($there->left('2/1h', 'post:bob'), 2, 'policy: a row of another user costs nothing');
$user{bob}[1]->ask(q{SELECT rl_check('x', '5/1h')});
is($user{bob}[1]->state, '42501', 'a role without privileges cannot call the function on the standby');

#
# A view: for each row, or once for a query
#

foreach my $where (0, 1)
{
	my $name = $where ? 'the standby' : 'the primary';
	my $bob = $user{bob}[$where];

	is($bob->ask('SELECT count(*) FROM each_note'), 3, "view: the view shows three rows on $name");
	is(cost($where, 'ask', 'bob', '3/1h'), 3, "view: each row costs a unit on $name");
	is($bob->ask('SELECT count(*) > 9 FROM once'), 't', "view: a call in a subquery of its own on $name");
	is(cost($where, 'ask', 'bob', '3/1h'), 1, "view: a call in a subquery costs a unit for all rows on $name");
	$bob->ask('SELECT count(*) FROM once') foreach 1 .. 3;
	is($bob->ask('SELECT count(*) FROM once'), 0, "view: without quota the view shows no rows on $name");
	is(cost($where, 'ask', 'bob', '3/1h'), 3, "view: all quota is used on $name");
}

#
# Promoted
#

$primary->stop;
# A refund that is overdue on the standby is sent after the promotion, too.
$here->ask(q{BEGIN READ ONLY; SELECT rl_check('held', 'concurrent 1/1h')});
$redis->cli('REPLICAOF', '127.0.0.1', 1);
$here->ends('COMMIT', 'a COMMIT on the standby while Redis cannot be written to');
await('the worker', sub { return $here->ask(q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'ratelimit refunds'}) eq '1' });
$standby->promote;
await('the promotion', sub { $here->ask('SELECT pg_is_in_recovery()') eq 'f' });
$redis->cli('REPLICAOF', 'NO', 'ONE');
await('the refund', sub { return ($redis->cli('HGET', 'rl:{held}', 'concurrent:3600000000') // '0') =~ /^0/ });
is($here->ask('SELECT refunds_lost FROM rl_status()'), 0, 'after the promotion the worker sends the refund');
$here->ends(q{CREATE TRIGGER enforce BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('shared', '5/1h');
	INSERT INTO orders VALUES (1, 1)}, 'after the promotion a trigger works');
is($here->left('5/1h', 'shared'), 0, 'after the promotion the limit has the primary\'s state');

done_testing();
