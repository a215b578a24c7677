# docs/queues.md with node-postgres, graphile-worker and pg-boss: the triggers on their tables,
# partitions that are made later too, and the handlers, whose jobs keep the limits and use up no
# attempt when they are put off.  script/test --clients installs them and runs this.
use RatelimitTest;
use DocPage;

my $docs = "$FindBin::RealBin/../../docs";
my $page = DocPage->new("$docs/queues.md");
my @blocks = @{ $page->{blocks} };
my ($tenant) = map { $_->{text} =~ /^(CREATE SCHEMA app;.*?\$\$;\n)/ms } DocPage->new("$docs/triggers.md")->commands;
my $redis = RedisServer->new->start;
my $node = shared_node($redis, "listen_addresses = '127.0.0.1'", 'max_connections = 60');

# Returns the block of a language that has this text.
sub block
{
	my ($language, $text) = @_;
	my ($block) = grep { $_->{language} eq $language && index($_->{text}, $text) >= 0 } @blocks;

	return $block ? $block->{text} : die "the page has no block with $text";
}

my $code = join "\n", map { block('js', $_) } 'async function work', 'async function pace', 'async function reserved';
my %queue = (
	plain => { sql => '', code => $code, name => 'a table' },
	graphile => { sql => $tenant =~ s/jsonb/json/r . block('pgsql', 'graphile_worker'), code => $code . block('js', 'graphile_worker'), name => 'graphile-worker' },
	boss => { sql => $tenant . block('pgsql', 'pgboss'), code => $code . block('js', 'pgboss'), name => 'pg-boss' });

foreach my $kind (qw(plain graphile boss))
{
	my %queue = %{ $queue{$kind} };
	my $output = '';

	$redis->cli('FLUSHALL');
	$node->safe_psql('postgres', "CREATE DATABASE $kind");
	$node->safe_psql($kind, 'CREATE EXTENSION ratelimit');
	if ($kind eq 'plain')
	{
		foreach my $block ($page->commands) { $node->safe_psql($kind, $block->{text} =~ s/^(?:INSERT|SELECT) .*\n//mgr); }
		$node->safe_psql($kind, 'DROP TRIGGER limit_jobs ON jobs');
	}
	{
		local %ENV = (%ENV, PGHOST => '127.0.0.1', PGPORT => $node->port, PGDATABASE => $kind, PGSSLMODE => 'disable',
			PGUSER => $node->safe_psql('postgres', 'SELECT current_user'), CODE => $queue{code}, SQL => $queue{sql});
		ok(eval { IPC::Run::run([ 'node', "$FindBin::RealBin/queues.js", $kind ], '<', \'', '>&', \$output, IPC::Run::timeout(300)) }, "$queue{name}: its program runs")
		  or diag $output, $@;
	}
	my %fact = $output =~ /^([\w ]+)\t(.*)$/mg;
	# A job that fails once runs again.
	my %expected = (error => 'none', 'runs of many' => 32, 'different jobs' => 31, 'other runs' => 20, 'most at a time' => 3, 'at the pace' => 'true', units => 'free', 'eleven calls' => 'true',
		$kind eq 'plain' ? () : (added => '100 PT429', 'put off' => 'true', attempts => '1 2', 'last attempts' => 1));

	note "measured: $fact{version}" if $fact{version};
	is($fact{$_} // 'none', $expected{$_}, "$queue{name}: $_") foreach sort keys %expected;
}

done_testing();
