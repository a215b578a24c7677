# docs/frameworks.md with the frameworks: where the error is, the handlers, connections,
# rows, tests and migrations.  script/test --clients installs the frameworks and runs this.
#
# A program of the folder frameworks prints facts: a line each, a name, a tab and a
# value.  EXAMPLE is the page's code for it, STATE and HINT the expressions of the page's
# table, and CUSTOMER the first of ten customers.  A program in Go or Java
# has the expressions put in before it is compiled.
use RatelimitTest;
use DocPage;
use File::Basename;

my $programs = "$FindBin::RealBin/frameworks";
my $dir = PostgreSQL::Test::Utils::tempdir;
my $docs = "$FindBin::RealBin/../../docs";
my $page = DocPage->new("$docs/frameworks.md");
my ($modules) = grep { -d "$_/pg" } split /:/, $ENV{NODE_PATH} // '';
my %client;    # the environment of each program
my $jdbc = '/usr/share/java/postgresql.jar';

# Writes a page's block that matches the pattern to a file, and returns the file's name.
sub example
{
	my ($name, $from, $pattern) = @_;
	my ($block) = grep { $_->{text} =~ $pattern } @{ $from->{blocks} };

	write_file($name, $block->{text});
	return "$dir/$name";
}

sub write_file
{
	my ($name, $text) = @_;

	mkdir dirname("$dir/$name");
	append_to_file("$dir/$name", $text);
	return;
}

# Runs a command and returns its output.  Prints the output if the command fails.
sub output
{
	my ($environment, @command) = @_;
	local %ENV = (%ENV, %client, %$environment);
	my $output = '';
	my $done = eval { IPC::Run::run(\@command, '<', \'', '>&', \$output, init => sub { chdir $dir or die $!; }) };

	diag "@command: ", $@, $output unless $done;
	return $output;
}

# Runs a program and returns its facts.
sub facts { return { output(@_) =~ /^([\w. -]+)\t(.*)$/mg }; }

# The rows of the page's first table, by the first word.
my %row;
foreach my $line (split /\n/, $page->{prose})
{
	my ($name, $class, $state, $hint) = $line =~ /^\| ([^|`]+.*?) \| `(.+?)`.*? \| `(.+)` \| `(.+)` \|$/ or next;

	$row{ (split / /, $name)[0] } = { name => $name, class => $class, state => $state, hint => $hint };
}

# Writes a copy of a program with the page's expressions put in.
sub filled
{
	my ($name, $row) = @_;

	write_file($name, slurp_file("$programs/" . basename($name)) =~ s/\@(STATE|HINT)\@/$row->{ lc $1 }/gr);
	return;
}

# The environment with the page's code, by framework.
my %env = map { ($_ => { PYTHONPATH => "$programs:$dir/$_", PYTHONDONTWRITEBYTECODE => 1 }) } qw(Django SQLAlchemy);
example('Django/example.py', $page, qr/process_exception/);
example('SQLAlchemy/example.py', $page, qr/starlette/);
$env{ActiveRecord} = { EXAMPLE => example('rails/example.rb', $page, qr/rescue_from/), REQUESTS => example('rails/requests.rb', $page, qr/before_action/) };
$env{$_} = { EXAMPLE => "$dir/node/example.js", SCHEMA => "$dir/drizzle/schema.js", PRISMA_CLIENT => "$dir/prisma/client" }
  foreach qw(Sequelize Drizzle Prisma);
example('node/example.js', $page, qr/tooMany\(error, request/);
example('pgx/example.go', $page, qr/pgconn/);
example('jdbc/Orders.java', DocPage->new("$docs/clients.md"), qr/class Orders/);

write_file('Django/shop/__init__.py', '');
write_file('Django/shop/models.py', <<'END');
from django.db import models


class Order(models.Model):
    customer = models.IntegerField()

    class Meta:
        db_table = 'orders'
END
my ($trigger) = map { $_->{text} =~ /^(CREATE OR REPLACE TRIGGER .*?;)/ms } $page->commands;
write_file('Django/shop/migrations/__init__.py', '');
write_file('Django/shop/migrations/0001_orders.py', <<"END");
from django.db import migrations, models


class Migration(migrations.Migration):
    operations = [
        migrations.CreateModel('Order', [('id', models.BigAutoField(primary_key=True)), ('customer', models.IntegerField())],
                               {'db_table': 'orders'}),
        migrations.RunSQL("""$trigger""", 'DROP TRIGGER limit_orders ON orders'),
    ]
END
symlink $modules // '', "$dir/$_/node_modules" foreach grep { mkdir "$dir/$_" } qw(drizzle prisma);
write_file('drizzle/schema.js', <<'END');
const { pgTable, integer, bigint } = require('drizzle-orm/pg-core');
exports.orders = pgTable('orders', {
  id: bigint({ mode: 'number' }).primaryKey().generatedByDefaultAsIdentity(),
  customer: integer().notNull(),
});
END
write_file('drizzle/drizzle.config.js', <<'END');
const { PGHOST: host, PGPORT: port, PGDATABASE: database } = process.env;
module.exports = {
  dialect: 'postgresql', schema: './schema.js', out: './out',
  dbCredentials: { host, port: Number(port), user: 'administrator', database, ssl: false },
};
END
write_file('prisma/schema.prisma', <<'END');
generator client {
  provider = "prisma-client-js"
  output   = "./client"
}
datasource db {
  provider = "postgresql"
}
model orders {
  id       BigInt @id @default(autoincrement())
  customer Int
}
END

#
# The servers: the page's SQL in a database of its own
#

my $redis = RedisServer->new->start;
my $node = shared_node($redis, "listen_addresses = '127.0.0.1'");

$node->safe_psql('postgres', 'CREATE DATABASE shop');
$node->safe_psql('postgres', 'CREATE ROLE administrator SUPERUSER LOGIN');
$node->safe_psql('shop', join '', map { $_->{text} } $page->commands);
$node->safe_psql('shop', q{
	CREATE ROLE app LOGIN CREATEDB;
	ALTER ROLE tester CREATEDB;
	GRANT SELECT, INSERT ON orders TO app});
%client = (PGHOST => '127.0.0.1', PGPORT => $node->port, PGDATABASE => 'shop', PGUSER => 'app', PGSSLMODE => 'disable',
	TMPDIR => $dir, PRISMA_SCHEMA_ENGINE_BINARY => '/bin/true', PRISMA_HIDE_UPDATE_MESSAGE => 1, CHECKPOINT_DISABLE => 1);
delete @ENV{qw(PGAPPNAME PGOPTIONS)};

#
# drizzle-kit
#

my @drizzle_kit = ('node', ($modules // '') . '/drizzle-kit/bin.cjs');
sub drizzle_kit
{
	my ($database, @arguments) = @_;

	return output({ PGDATABASE => $database }, 'sh', '-c', 'cd drizzle && exec "$@"', 'sh', @drizzle_kit, @arguments);
}

like(drizzle_kit('shop', 'push', '--force'), qr/No changes detected/, 'drizzle-kit push leaves a schema of its own');
$node->safe_psql('postgres', 'CREATE TABLE orders (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, customer integer NOT NULL)');
like(drizzle_kit('postgres', 'push', '--force'), qr/cannot drop view rl_/, 'drizzle-kit push fails with the extension in public');
drizzle_kit('shop', 'generate', '--custom', '--name=limit');
ok(-f "$dir/drizzle/out/0000_limit.sql", 'drizzle-kit generate --custom makes a file');

#
# The programs
#

$node->safe_psql('shop', q{
	CREATE TABLE refunded_orders (customer int NOT NULL);
	CREATE TRIGGER limit_orders BEFORE INSERT ON refunded_orders
		FOR EACH ROW EXECUTE FUNCTION ratelimit.rl_enforce('refunded:{customer}', '5/1h refund_on_abort');
	GRANT INSERT ON refunded_orders TO app});
filled('pgx/pgx.go', $row{pgx});
filled('jdbc/Batches.java', $row{JDBC});
output({ GO111MODULE => 'off', GOPATH => '/usr/share/gocode', GOCACHE => "$dir/go" },
	'go', 'build', '-o', "$dir/pgx/pgx", map { "$dir/pgx/$_.go" } qw(pgx example));
output({}, 'javac', '-cp', $jdbc, '-d', "$dir/jdbc", map { "$dir/jdbc/$_.java" } qw(Orders Batches));
output({}, 'sh', '-c', 'cd prisma && node node_modules/prisma/build/index.js generate');
my %refused_twice = (batch => 'PT429', 'batch again' => 'PT429');
my %batches = (%refused_twice, 'batch that refunds' => 'PT413');
my %pooled = (connection => 'closed', 'connection in a transaction' => 'kept');
my @frameworks = (
	{ name => 'Django', command => [ '/usr/bin/python3', "$programs/django_.py" ] },
	{ name => 'SQLAlchemy', command => [ '/usr/bin/python3', "$programs/sqlalchemy_.py" ], more => \%refused_twice },
	{ name => 'ActiveRecord', command => [ 'ruby', "$programs/active_record.rb" ], more => { requests => '200 and 429' } },
	{ name => 'Sequelize', command => [ 'node', "$programs/node.js", 'Sequelize' ], more => { %pooled, connection => 'kept' } },
	{ name => 'Drizzle', command => [ 'node', "$programs/node.js", 'Drizzle' ], more => \%pooled },
	{ name => 'Prisma', command => [ 'node', "$programs/node.js", 'Prisma' ], more => { %pooled, code => 'P2039' } },
	{ name => 'pgx', command => [ "$dir/pgx/pgx" ], more => \%batches },
	{ name => 'JDBC', command => [ 'java', '-Xmx64m', '-XX:+UseSerialGC', '-cp', "$jdbc:$dir/jdbc", 'Batches' ],
		more => { %batches, 'other answer' => undef, seconds => '<number>' } });
my $customer = 1000;

$node->safe_psql('shop', q{
	GRANT USAGE ON SCHEMA ratelimit TO app;
	GRANT EXECUTE ON FUNCTION ratelimit.rl_enforce(text, ratelimit.rl_limits, bigint) TO app});
foreach my $framework (@frameworks)
{
	my $name = $framework->{name};
	my $row = $row{$name} || {};
	my $facts = facts({ %{ $env{$name} || {} }, STATE => $row->{state}, HINT => $row->{hint}, CUSTOMER => $customer += 10 },
		@{ $framework->{command} });
	my %expected = (version => DocPage::plain($row->{name} // ''), class => $row->{class}, state => 'PT429',
		hint => 'Retry after <number> seconds.', 'other answer' => 'PT413', rows => 'PT413', then => 'PT429',
		connection => 'kept', %{ $framework->{more} || {} });

	note "measured: $facts->{version}" if $facts->{version};
	is(DocPage::plain($facts->{$_} // 'none'), $expected{$_}, "$name: $_") foreach grep { defined $expected{$_} } sort keys %expected;
	like($facts->{answer} // 'none', qr/^429 (6\d\d|7[01]\d|720)$/, "$name: the page's code answers") if $name ne 'JDBC';
}

#
# Answers: each driver that the page names, by a trigger, by rl_enforce, and while Redis is away
#

$node->safe_psql('shop', q{
	CREATE ROLE app_away LOGIN;
	ALTER ROLE app_away SET ratelimit.redis_url = 'redis://127.0.0.1:1';
	GRANT INSERT, SELECT ON orders TO app_away;
	GRANT USAGE ON SCHEMA ratelimit TO app_away});
my %answers = (%{ facts({ %{ $env{Prisma} }, CUSTOMER => 2000 }, 'node', "$programs/answers.js") },
	%{ facts({ %{ $env{SQLAlchemy} }, CUSTOMER => 3000 }, '/usr/bin/python3', "$programs/answers.py") });
foreach my $driver ((map { ("$_ in Express", "$_ in Fastify") } qw(node-postgres postgres.js Knex Kysely TypeORM Sequelize Drizzle Prisma)),
	qw(psycopg2 psycopg asyncpg), map { "SQLAlchemy over $_" } qw(psycopg2 asyncpg))
{
	like($answers{$driver} // 'none', qr/^(20[01], ){5}429 (6\d\d|7[01]\d|720), 20[01], 429 3[56]\d\d, 500, 500$/, "$driver: 429, and 500 while Redis is away");
}

# README's application, and its loop.
{
	my $readme = DocPage->new("$docs/../README.md");
	my $port = RedisServer::free_port();
	my ($loop) = map { $_->{text} =~ s/3000/$port/r } grep { $_->{text} =~ /curl/ } @{ $readme->{blocks} };

	$node->safe_psql('shop', 'CREATE ROLE shop_app LOGIN; GRANT SELECT, INSERT ON orders TO shop_app');
	example('node/app.js', $readme, qr/express/);
	is(output({ PORT => $port }, 'sh', '-c', "node node/app.js & while ! curl -s localhost:$port >/dev/null && kill -0 \$!; do sleep 0.1; done\n$loop\nkill \$!"),
		'201 201 201 201 201 429 ', "README's application answers the sixth order with 429");
}

#
# Schemas and tests
#

my %administrator = (PGUSER => 'administrator', PATH => dirname($node->installed_command('pg_dump')) . ":$ENV{PATH}");
is_deeply(facts({ %{ $env{ActiveRecord} }, %administrator }, 'ruby', "$programs/active_record.rb", 'schemas'),
	{ 'schema.rb' => 'false', 'structure.sql' => 'true' }, 'schema.rb leaves out triggers, and structure.sql has them');
$node->safe_psql('template1', 'CREATE SCHEMA ratelimit; CREATE EXTENSION ratelimit SCHEMA ratelimit');
$node->safe_psql('template1', q{
	GRANT USAGE ON SCHEMA ratelimit TO app, tester;
	GRANT EXECUTE ON FUNCTION ratelimit.rl_enforce() TO app, tester;
	GRANT CREATE ON SCHEMA public TO app, tester});
foreach my $role (qw(app tester))
{
	my $facts = facts({ %{ $env{Django} }, PGUSER => $role }, '/usr/bin/python3', "$programs/django_.py", 'tests');

	is($facts->{tests}, $role eq 'app' ? '1 of 2 fail' : '0 of 2 fail', "Django: TestCase as $role, a charge outlives its rollback");
}
$node->safe_psql('postgres', 'CREATE DATABASE synced TEMPLATE template1 OWNER app');
my $synced = facts({ %{ $env{Sequelize} }, PGDATABASE => 'synced', TRIGGER => $trigger },
	'node', "$programs/node.js", 'Sequelize', 'others');
is($synced->{'triggers before and after sync'}, '1,0', 'Sequelize: sync drops the trigger');
my @tester = (connstr => $node->connstr('shop') . ' user=tester', on_error_stop => 0);
my (undef, undef, $errors) = $node->psql('shop', 'INSERT INTO orders (customer) SELECT 42 FROM generate_series(1, 9)', @tester);
is($errors, '', 'the role of the page has no limits');
(undef, undef, $errors) = $node->psql('shop', q{
	SELECT ratelimit.rl_reset('create_order:42');
	INSERT INTO orders (customer) SELECT 42 FROM generate_series(1, 5);
	SELECT ratelimit.rl_reset('create_order:42');
	INSERT INTO orders (customer) SELECT 42 FROM generate_series(1, 5);
	INSERT INTO orders (customer) VALUES (42)}, connstr => $node->connstr('shop') . ' user=limit_tester', on_error_stop => 0);
like($errors, qr/^(?!.*ERROR.*ERROR).*ERROR:  rate limit "throttle 5\/1h" exceeded/s, 'the other role of the page can reset a limit');
foreach my $role (qw(app tester limit_tester))
{
	(undef, undef, $errors) = $node->psql('shop', q{SET ratelimit.mode = 'off'}, connstr => $node->connstr('shop') . " user=$role");
	like($errors, qr/permission denied to set parameter/, "$role may not change the mode");
}

done_testing();
