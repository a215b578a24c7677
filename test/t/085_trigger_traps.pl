# Triggers that could lose rows, show keys or be bypassed, and what rl_triggers says of them.
use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisServer;
use Test::More;

my $redis = RedisServer->new->start;
my $node = new_node($redis);
my $admin = session($node);

$node->safe_psql('postgres', q{
	CREATE ROLE bob LOGIN;
	CREATE ROLE keeper;
	GRANT EXECUTE ON FUNCTION attempt TO bob});
my $bob = session($node, 'postgres', 'bob');

#
# Keys in the errors of a foreign key's query, which runs as the owner of the table
#

$admin->ask(q{
	CREATE TABLE accounts (id int PRIMARY KEY);
	CREATE TABLE history (account int REFERENCES accounts ON DELETE CASCADE ON UPDATE CASCADE, iban text);
	ALTER TABLE accounts OWNER TO keeper;
	ALTER TABLE history OWNER TO keeper;
	GRANT SELECT, UPDATE, DELETE ON accounts TO bob;
	INSERT INTO accounts VALUES (1), (2);
	INSERT INTO history VALUES (1, 'DE89'), (1, 'DE89'), (2, 'DE90')});

# Checks that this trigger refuses a statement, and that the detail has no key.
sub hides
{
	my ($trigger, $statement, $name) = @_;

	$admin->ask("CREATE $trigger EXECUTE FUNCTION rl_enforce('$name:{iban}', '1/1d')");
	is($admin->error, '', "$name: the trigger");
	$bob->fails($statement, $name, 'PT429', qr/^rate limit "throttle 1\/1d" exceeded$/, qr/^The key has 0 of 1 left; the action takes 1\./);
	$admin->ask('DROP TRIGGER t ON history');
	return;
}

hides('TRIGGER t BEFORE DELETE ON history FOR EACH ROW', 'DELETE FROM accounts WHERE id = 1', 'cascade before');
hides('TRIGGER t AFTER DELETE ON history FOR EACH ROW', 'DELETE FROM accounts WHERE id = 1', 'cascade after');
hides('TRIGGER t BEFORE UPDATE ON history FOR EACH ROW', 'UPDATE accounts SET id = 3 WHERE id = 1', 'cascade of an update');
$admin->ask(q{CREATE TRIGGER t BEFORE UPDATE ON history FOR EACH ROW EXECUTE FUNCTION rl_enforce('seen:{iban}', '1/1d')});
$admin->fails('UPDATE history SET account = 1', 'an update without a foreign key', 'PT429', qr/exceeded$/, qr/^Key "seen:DE89" has 0 of 1 left/);
$admin->ask('DROP TABLE history, accounts');

done_testing();
