# README.md and the pages of clients, frameworks and PostgREST, pasted one after another into
# a fresh database, and each other page into one of its own: no error but those that a page shows.
# An ordinary role, which owns the database, runs what needs no superuser.
#
# Runs once in a suite: PostgreSQL runs the pages.
use RatelimitTest;
use DocPage;

my $root = "$FindBin::RealBin/../..";
my @in_order = qw(README.md docs/clients.md docs/frameworks.md docs/postgrest.md);
my $redis = RedisServer->new->start;
my $node = shared_node($redis);

# What needs a superuser, or is a grant, and what the page's role for tests does.
my $administration = qr/^(?:CREATE (?:EXTENSION|ROLE|SCHEMA IF NOT EXISTS ratelimit)|ALTER (?:ROLE|DATABASE|EXTENSION|SYSTEM)|LOAD|GRANT|SET ROLE|(?:RE)?SET (?:LOCAL )?ratelimit\.|SELECT pg_reload_conf|CREATE FUNCTION .* SET ratelimit\.)\b/s;
my $of_tester = qr/^(?:SELECT ratelimit\.rl_reset|SET ratelimit\.key_prefix)/;

$node->safe_psql('postgres', 'CREATE ROLE shop_owner LOGIN; CREATE DATABASE shop OWNER shop_owner');

# Returns the statements of a block.
sub statements
{
	my ($text) = @_;
	my @statements;
	my $statement = '';

	foreach my $line (split /^/, $text)
	{
		$statement .= $line;
		push(@statements, $statement), $statement = ''
		  if $line =~ /;\s*(?:--.*)?$/ && !((() = $statement =~ /\$\$/g) % 2);
	}
	is($statement =~ s/\s//gr, '', 'a block ends with a statement');
	return @statements;
}

# Returns the input of a psql for a page, each statement by its role.
sub script
{
	my ($page) = @_;
	my $script = "\\set SHOW_CONTEXT never\n";
	my $switched = 0;

	foreach my $statement (map { statements($_->{text}) } $page->commands)
	{
		my $command = $statement =~ s/^(?:\s|--.*\n)+//r;
		my $role = $command =~ $administration || $switched ? '' : $command =~ $of_tester ? 'limit_tester' : 'shop_owner';

		$switched = 1 if $command =~ /^SET ROLE/;
		$switched = 0 if $command =~ /^RESET ROLE/;
		$script .= $role ? "SET SESSION AUTHORIZATION $role;\n$statement\nRESET SESSION AUTHORIZATION;\n" : "$statement\n";
		# As the pages say, a role that calls functions, or creates triggers, gets EXECUTE.
		$script .= grants($1) if $command =~ /^(?:CREATE|ALTER) EXTENSION (?:IF NOT EXISTS )?(\w+)/;
	}
	return $script;
}

# Returns statements that let shop_owner use the extension, wherever it is: what the first pages name, or all of it.
sub grants
{
	my ($extension, $all) = @_;
	my $named = $all ? '' : q{AND p.proname IN ('rl_enforce', 'rl_throttle', 'rl_check', 'rl_allow', 'rl_peek', 'rl_headers', 'rl_reserve', 'rl_settle')};

	return qq{SELECT format('GRANT USAGE ON SCHEMA %I TO shop_owner', nspname) FROM pg_extension e JOIN pg_namespace n ON n.oid = extnamespace
		WHERE extname = '$extension'
		UNION ALL SELECT format('GRANT EXECUTE ON FUNCTION %s TO shop_owner', p.oid::regprocedure) FROM pg_proc p
		WHERE p.proname ~ '^rl_' $named
		UNION ALL SELECT format('GRANT SELECT ON %s TO shop_owner', c.oid::regclass) FROM pg_class c WHERE relname ~ '^rl_' AND relkind = 'v' AND @{[ $all ? 'true' : 'false' ]}
		\\gexec\n};
}

# Pastes a page into a database.
sub paste
{
	my ($name, $database) = @_;
	my $page = DocPage->new("$root/$name");
	my $shown = join '', map { $page->shown($_) // '' } $page->commands;
	my $errors = '';
	my @expected = $shown =~ /^ERROR: +(.*)$/mg;

	IPC::Run::run([ $node->installed_command('psql'), '-X', '-q', '-d', $node->connstr($database) ], '<', \script($page), '>', \my $printed,
		'2>', \$errors);
	return is_deeply([ $errors =~ /(?:ERROR|FATAL): +(.*)$/mg ], \@expected, "$name: only the errors that it shows") || diag $errors;
}

paste($_, 'shop') foreach @in_order;
is($node->safe_psql('shop', q{SELECT count(*) FROM ratelimit.rl_triggers WHERE problem IS NOT NULL}), 0, 'each trigger can fire');

# Each other page has a database of its own, whose owner may call all functions that decide.
$node->safe_psql('postgres', 'CREATE DATABASE page_template OWNER shop_owner');
$node->safe_psql('page_template', 'CREATE EXTENSION ratelimit');
$node->safe_psql('page_template', grants('ratelimit', 1));
foreach my $name (grep { my $n = $_; !grep { $_ eq $n } @in_order } map { substr $_, length "$root/" } glob "$root/docs/*.md")
{
	my @blocks = DocPage->new("$root/$name")->commands or next;
	my $creates = grep { $_->{text} =~ /^CREATE EXTENSION/m } @blocks;

	$node->safe_psql('postgres', "CREATE DATABASE page @{[ $creates ? '' : 'TEMPLATE page_template' ]} OWNER shop_owner");
	paste($name, 'page');
	$node->safe_psql('postgres', 'DROP DATABASE page WITH (FORCE)');
}

done_testing();
