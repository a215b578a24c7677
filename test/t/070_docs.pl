# The pages: *.md, docs/*.md and src/README.md.  Every SQL block runs and prints the output of
# the page, every link has a target, and the pictures are those of script/plots.
# docs/reference.md names exactly the names of the code and the catalogs.  DocPage.pm
# has the convention of the blocks.
#
# Some pages also run with the local store, where nothing but the column "source" may differ.
#
# With RATELIMIT_PAGES='README.md docs/recipes.md,local', only the blocks of these pages run.
# RATELIMIT_PAGES_TO names a folder to which the pages are written with the outputs
# that psql printed.  Every user must be able to write there.
#
#
# Runs once in a suite: the pages name one server.
use RatelimitTest;
use DocPage;
use File::Basename;

my $root = "$FindBin::RealBin/../..";
my %page = map { (substr($_, length("$root/")) => DocPage->new($_)) } glob "$root/*.md $root/docs/*.md";
# The page about the sources names the code's functions, which the catalogs do not have.
my %every = (%page, 'src/README.md' => DocPage->new("$root/src/README.md"));
my $redis = RedisServer->new->start;
my $node = shared_node($redis, "ratelimit.redis_url = '" . $redis->url(tcp => 1, db => 0) . "'", 'timezone = UTC');

#
# The blocks
#

# What DocPage adds to a page that does not create the extension itself.
my $creation = qr/^CREATE EXTENSION ratelimit;\n\\connect\n/m;

# One session for each database runs all queries, because starting a psql takes longer.
my %session;
sub ask
{
	my ($sql, $database) = @_;
	my $session = $session{ $database || 'postgres' } //= session($node, $database);
	my $output = $session->ask($sql);

	die $session->error if $session->error;
	return $output;
}

# A page with these words needs a restart, because it shows or changes what shared memory or a file keeps, and so does a
# page after one that changes the file.  In the long form, each page has one.
my $kept = qr/ALTER SYSTEM|\b(?:lease \d|rl_denied|rl_stat\b|rl_status)/;
my ($prepared, $changed) = (0, 1);

# Resets the server: a new database, no other roles, empty statistics.  Returns true if the database has the extension.
sub prepare
{
	my ($page, $store) = @_;
	my $text = join '', map { $_->{text} } $page->commands;
	my $restart = is_long() || $store || $changed || $text =~ $kept;
	my $extended = $page->script =~ $creation;
	my $template = $extended ? 'postgres' : 'template0';

	# No session may be connected to the template.
	ask("SET client_min_messages = warning; LOAD 'ratelimit';\n" . slurp_file("$root/test/reset.sql") . "CREATE DATABASE shop TEMPLATE $template;", 'template1');
	ask("ALTER SYSTEM SET ratelimit.store = $store", 'template1') if $store;
	if ($restart)
	{
		delete($session{template1})->quit;
		start_node($node, 'restart');
	}
	else
	{
		# The server remembers which keys of a database of Redis are refused.
		ask(q{ALTER DATABASE shop SET ratelimit.redis_url = '} . $redis->url(tcp => 1, db => ++$prepared % 16) . q{'}, 'template1');
	}
	$changed = $store || $text =~ /ALTER SYSTEM/;
	$redis->cli('FLUSHALL');
	return $extended;
}

# Runs the page's blocks in one psql and returns their outputs.
sub outputs
{
	my ($page, $extended) = @_;
	my $address = '127.0.0.1:' . $redis->port;
	my $script = $extended ? $page->script =~ s/$creation//r : $page->script;
	my $printed = '';

	$script =~ s/127\.0\.0\.1:6379/$address/g;
	IPC::Run::run([ $node->installed_command('psql'), '-X', '-q', '-P', 'pager=off', '-d', $node->connstr('shop') ],
		'<', \$script, '>&', \$printed);
	$printed =~ s/\Q$address\E/127.0.0.1:6379/g;
	return $page->outputs($printed);
}

my @wanted = split ' ', $ENV{RATELIMIT_PAGES} || join ' ', (sort keys %every), map { "$_,local" } 'README.md', is_long() ? 'docs/frameworks.md' : (), 'docs/recipes.md';

foreach my $wanted (@wanted)
{
	my ($name, $store) = split /,/, $wanted;
	my $page = $every{$name} or BAIL_OUT("there is no page $name");
	my @blocks = $page->commands or next;

	my @printed = outputs($page, prepare($page, $store));
	@printed = map { s/\| local\b/| redis/gr } @printed if $store;
	is(@printed, @blocks + 1, "$wanted: psql ran all blocks") or diag $printed[-1];
	foreach my $i (0 .. $#blocks)
	{
		my $printed = $printed[$i] // next;
		my $does = defined $page->shown($blocks[$i]) ? 'prints the output of the page' : 'succeeds';

		ok($page->right($blocks[$i], $printed), "$wanted, line $blocks[$i]{line}: $does") or diag $printed;
	}
	is($redis->cli('DBSIZE'), 0, "$wanted: Redis has nothing") if $store;
	next if $store;
	next unless $page{$name} && $ENV{RATELIMIT_PAGES_TO};
	unlink "$ENV{RATELIMIT_PAGES_TO}/" . basename($name);
	append_to_file("$ENV{RATELIMIT_PAGES_TO}/" . basename($name), $page->with_outputs(@printed[ 0 .. $#blocks ]));
}

#
# The links
#

foreach my $name (sort keys %every)
{
	my $folder = dirname($name);
	my @dead;

	foreach my $link ($every{$name}->links)
	{
		next if $link =~ /^\w+:/;
		my ($path, $anchor) = $link =~ /^([^#]*)(?:#(.*))?$/;
		my $target = $path eq '' ? $name : "$folder/$path" =~ s{^\./}{}r;

		$target =~ s{[^/]+/\.\./}{};
		push @dead, $link
		  if !-e "$root/$target"
		  || defined $anchor && !($every{$target} && grep { $_ eq $anchor } $every{$target}->anchors);
	}
	is_deeply(\@dead, [], "$name: no link is dead");
}

#
# docs/reference.md
#

my $reference = slurp_file("$root/docs/reference.md");
my %section = $reference =~ /^### ([^\n]*)\n(.*?)(?=^##|\z)/gms;
my $code = join '', map { slurp_file($_) } split /\n/, qx(find "$root/src" -name '*.[ch]');

# Returns a query's rows.
sub rows { my ($sql) = @_; return [ split /\n/, ask($sql) ]; }

# Returns the first cells of the tables with this header.
sub cells
{
	my ($header, $text) = @_;
	my @cells;

	push @cells, map { /^\| ([^|]*) \|/ ? $1 =~ /`(\w+)`/g : () } split /\n/, $1
	  while $text =~ /^\| \Q$header\E \|.*\n\|[ -|]*\n((?:\|.*\n)*)/gm;
	return [ sort @cells ];
}

# Compares two lists of names, in any order.
sub same
{
	my ($shown, $there, $name) = @_;
	my %shown = map { ($_ => 1) } @$shown;
	my %there = map { ($_ => 1) } @$there;

	is(join(', ', grep { !$shown{$_} } sort keys %there), '', "$name: all are shown");
	is(join(', ', grep { !$there{$_} } sort keys %shown), '', "$name: no others are shown");
	return;
}

$node->safe_psql('postgres', 'ALTER SYSTEM RESET ALL');
my ($procs, $classes, $type_members) = map { '(' . members($_) . ')' } qw(pg_proc pg_class pg_type);
my $functions = rows(qq{SELECT proname || '(' || regexp_replace(regexp_replace(regexp_replace(pg_get_function_arguments(p.oid),
		',? ?OUT [^,]*', '', 'g'), ' DEFAULT ([^,:]+)(::[^,]*)?', '=\\1', 'g'), '\\m(?!VARIADIC )(\\w+) [^=,]+(,|=|\$)', '\\1\\2', 'g') || ')'
	FROM pg_proc p WHERE proname !~ '^rl_limits_' AND prorettype <> 'trigger'::regtype
		AND to_regclass(proname) IS NULL AND oid IN $procs});
same([ map { /^(rl_\w+\(.*\))$/ ? $1 =~ s/ = /=/gr : () } keys %section ], $functions, 'reference.md: functions and their arguments');

my $types = rows(qq{SELECT relname FROM pg_class WHERE oid IN $classes
	UNION SELECT typname FROM pg_type WHERE oid IN $type_members AND typname !~ '^_' AND typtype <> 'p'});
same([ grep { /^rl_\w+$/ } keys %section ], $types, 'reference.md: types and views');
foreach my $name (grep { /^rl_\w+(?:\(\))?$/ && $section{$_} =~ /^\| column /m } keys %section)
{
	my $relation = $name =~ s/\(\)$//r;

	same(cells('column', $section{$name}), rows(qq{SELECT attname FROM pg_attribute
			WHERE attrelid = to_regclass('$relation') AND attnum > 0
		UNION SELECT unnest(proargnames) FROM pg_proc WHERE proname = '$relation'}), "reference.md: columns of $relation");
}
my @columns = map { /^rl_/ ? @{ cells('column', $section{$_}) } : () } keys %section;
my %column = map { ($_ => 1) } @columns, qw(rule);
is_deeply([ grep { !$column{$_} } @{ rows(qq{SELECT DISTINCT name FROM pg_proc, unnest(proargnames, proargmodes) AS a (name, mode)
	WHERE mode IN ('o', 't') AND oid IN $procs}) } ], [],
	'reference.md: no other column is returned');

same([ grep { /^ratelimit\./ } keys %section ], rows(q{LOAD 'ratelimit'; SELECT name FROM pg_settings WHERE name LIKE 'ratelimit.%'}),
	'reference.md: settings');
foreach my $setting (sort grep { /^ratelimit\./ } keys %section)
{
	my ($default) = $section{$setting} =~ /Default:\s(?:`([^`\n]*)`|empty)/ or fail("$setting has a default"), next;

	my $fixed = $setting =~ /local_max_keys|local_persistence/;
	my $value = "'" . ($default // '') . "'";
	my $same = rows("BEGIN; " . ($fixed ? '' : "SET LOCAL $setting = $value; ")
		. 'SELECT boot_val = ' . ($fixed ? $value : 'setting') . " FROM pg_settings WHERE name = '$setting'; ROLLBACK");

	is("@$same", 't', "reference.md: the default of $setting");
}

my %sqlstate = reverse slurp_file($node->config_data('--sharedir') . '/errcodes.txt') =~ /^(\w{5})\s+\w\s+(ERRCODE_\w+)/gm;
%sqlstate = (%sqlstate, map { s/[',\s]//gr } $code =~ /#define (ERRCODE_\w+) +MAKE_SQLSTATE\((.*?)\)/g);
my %raised = map { ($sqlstate{$_} || $_ => 1) } $code =~ /\b(ERRCODE_\w+)/g;
same(cells('SQLSTATE', $reference), [ keys %raised ], 'reference.md: SQLSTATEs');

my ($sources) = $code =~ /source_names\[\]\[MAX_SOURCE\] = \{(.*?)\}/s or die 'no names of sources in the code';
same(cells('source', $reference), [ $sources =~ /"(\w+)"/g ], 'reference.md: sources');

# The names on a page exist.
my %exists = map { ($_ => 1) } @$types, (map { /(\w+)/ } @$functions), qw(rl_enforce), grep { /^ratelimit\./ } keys %section;
foreach my $name (sort keys %page)
{
	my $text = slurp_file("$root/$name") =~ s/\]\([^)]*\)//gr;
	my %named = map { ($_ => 1) }
	  $text =~ m{(?<![\w/])(rl_[a-z_]+[a-z]|ratelimit\.(?!so\b|control\b|spdx\b|rl_)[a-z_]+[a-z])\b(?!\.md)}g;

	is_deeply([ grep { !$exists{$_} } sort keys %named ], [], "$name: all names exist");
}

#
# The pictures
#

my @pictures = map { basename($_, '.svg') } glob "$root/docs/*.svg";
isnt(scalar @pictures, 0, 'docs/ has pictures');
# One psql draws them all, because most of the work is to make what they show.
my ($drawn, $errors) = ('', '');
IPC::Run::run([ $node->installed_command('psql'), '-XqAt', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('postgres'),
		'-v', 'redis=' . $redis->url(tcp => 1, db => 0), '-v', 'none=redis://127.0.0.1:1', '-f', "$root/script/plots.sql",
		map { ('-c', "SELECT pg_temp.picture('$_')", '-c', '\echo ===') } @pictures ], '>', \$drawn, '2>', \$errors);
my @drawn = split /^===\n/m, $drawn;
foreach my $i (0 .. $#pictures)
{
	ok(($drawn[$i] // '') eq slurp_file("$root/docs/$pictures[$i].svg"), "docs/$pictures[$i].svg is the picture of script/plots") or diag $errors;
}

done_testing();
