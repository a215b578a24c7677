# Triggers: templates of keys, the fields of errors, and rules that no row can satisfy.
use strict;
use warnings FATAL => 'all';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RatelimitTest;
use RedisServer;
use Test::More;

my $redis = RedisServer->new->start;
my $node = shared_node($redis);
my $session = session($node);

#
# Long templates: if their parsing were quadratic, it would take minutes
#

$session->ask(q{SET statement_timeout = '60s';
	CREATE TABLE long (a text);
	DO $$BEGIN EXECUTE format('CREATE TRIGGER enforce BEFORE INSERT ON long FOR EACH ROW EXECUTE FUNCTION rl_enforce(%L, %L)', repeat('x', 5000000), '5/1s'); END$$});
is($session->ask('SELECT problem FROM rl_triggers'), 'key must not be longer than 512 bytes: Its template has 5000000 bytes without the columns.',
	'a template that is too long');
$session->fails(q{INSERT INTO long VALUES ('a')}, 'a row under it', '22023', qr/^key must not be longer than 512 bytes/);
$session->ask('DROP TABLE long; RESET statement_timeout');

$session->quit;
$node->stop;
$redis->stop;
done_testing();
