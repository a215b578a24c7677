# The control file, META.json, the changelogs and the docs name the same version, and
# the code gets it from the control file.
#
# Runs once: it reads only the files.
use RatelimitTest;
use File::Find;
use JSON::PP;

my $root = "$FindBin::RealBin/../..";
my $version = version();

# Returns the paths of files and of the files in folders, relative to the root, without
# those that the build makes.
sub files
{
	my (@names) = @_;
	my @files;

	find({ no_chdir => 1, wanted => sub { push @files, substr $_, length "$root/" if -f && !/\.(?:o|bc|d)$|\/commit\.h$/ } }, grep { -e } map { "$root/$_" } @names);
	return sort @files;
}

# Returns what the pattern captures in a file of the root.
sub captured
{
	my ($pattern, $file) = @_;

	return slurp_file("$root/$file") =~ $pattern;
}

# Returns the files in which another text follows "ratelimit" where a version is.
sub others
{
	return map { my $file = $_; map { "$file: $_" } grep { $_ ne $version } captured(qr/\bratelimit(?:--|-| )v?(\d+(?:\.\d+)++)(?!--)/, $file) } @_;
}

like($version, qr/^\d+\.\d+\.\d+$/, "the control file: $version is a semantic version");

my $meta = decode_json(slurp_file("$root/META.json"));
my $provided = $meta->{provides}{ratelimit};
is($meta->{version}, $version, 'META.json: the version of the distribution');
is($provided->{version}, $version, 'META.json: the version of the extension');
is($provided->{file}, "sql/ratelimit--$version.sql", 'META.json: the file');
ok(-f "$root/$provided->{$_}", "META.json: there is $provided->{$_}") foreach 'file', 'docfile';

is((captured(qr/^## (\S+)/m, 'CHANGELOG.md'))[0], $version, 'CHANGELOG.md: the first heading');
SKIP:
{
	skip 'there is no debian/changelog' unless -f "$root/debian/changelog";
	is((captured(qr/\A\S+ \((?:\d+:)?([^)]*)-[^-)]+\)/, 'debian/changelog'))[0], $version, 'debian/changelog: the first line');
}

my @pages = files('README.md', 'CONTRIBUTING.md', 'SECURITY.md', 'docs', 'src/README.md', 'script', 'demo');
cmp_ok(scalar @pages, '>', 20, 'pages and scripts: ' . @pages . ' files');
is(join("\n", others(@pages)), '', 'pages and scripts name no other version');
is(join("\n", grep { captured(qr/(?<![\d.])\Q$version\E(?![\d.])/, $_) } files('Makefile', 'src', 'script')), '',
	'sources, the Makefile and scripts do not repeat the version');

# The variables of the make that runs this test.
delete @ENV{qw(MAKEFLAGS MAKELEVEL MAKEOVERRIDES MFLAGS)};
chomp(my $pg_config = qx(pg_config --bindir));
like(scalar qx(make -s -n -C "$root" -W src/ratelimit.c PG_CONFIG="$pg_config/pg_config" src/ratelimit.o), qr/-DRL_VERSION='"\Q$version\E"'/,
	'the Makefile passes the version to the compiler');

done_testing();
