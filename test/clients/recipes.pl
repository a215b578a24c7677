# The asyncio programs of docs/recipes.md: they hold no transaction and no connection while they
# wait, settle what was used, renew units, and stop when these are lost.
use RatelimitTest;
use DocPage;

my $dir = PostgreSQL::Test::Utils::tempdir;
my $redis = RedisServer->new->start;
my $node = shared_node($redis, "listen_addresses = '127.0.0.1'");
my $page = DocPage->new("$FindBin::RealBin/../../docs/recipes.md");
my @programs = map { $_->{text} } grep { $_->{language} eq 'python' } @{ $page->{blocks} };
my $session = session($node);

is(@programs, 2, 'the page has two programs');
append_to_file("$dir/tokens.py", $programs[0]);
append_to_file("$dir/exports.py", $programs[1]);
foreach my $function (qw(begin_answer begin_export))
{
	$session->ask($_->{text} =~ s/^SELECT .*//msr) foreach grep { $_->{text} =~ /CREATE FUNCTION $function/ } $page->commands;
	is($session->error, '', "$function is there");
}
$session->ask('CREATE ROLE app LOGIN; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO app');

my $output = '';
{
	my ($watcher) = split /\n/, $session->ask('SELECT current_user');
	local %ENV = (%ENV, PGHOST => '127.0.0.1', PGPORT => $node->port, PGDATABASE => 'postgres', PGSSLMODE => 'disable', WATCHER => $watcher,
		PYTHONPATH => $dir, PYTHONDONTWRITEBYTECODE => 1);
	ok(eval { IPC::Run::run([ '/usr/bin/python3', "$FindBin::RealBin/recipes.py" ], '<', \'', '>&', \$output, IPC::Run::timeout(120)) }, 'the programs run')
	  or diag $output, $@;
}
my %fact = $output =~ /^([\w ]+)\t(.*)$/mg;

# The estimate of each of 20 prompts is 8 // 3 + 2000.
my %expected = (
	answers => '20 at a time over one connection', 'open transactions' => 0, reserved => 20 * 2002, returned => 'an answer',
	used => 20 * 1234, error => 'no model', 'used after failures' => 20 * 1234, refused => 'None 0',
	fourth => 'False 0', 'same job' => 'False 0', 'fourth later' => 'False 0', ended => 'True True True', 'job that has ended' => 'False 0',
	held => 0, 'export fails' => 'no disk', 'held then' => 0, 'unit lost' => 'False 1', outage => 'PT504 1');

is($fact{$_} // 'none', $expected{$_}, $_) foreach sort keys %expected;

done_testing();
