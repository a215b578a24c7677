# The control file, META.json, the changelogs and the docs name the same version, and
# the code gets it from the control file.  The maintainer and the addresses of META.json are
# in each file that needs them, and ratelimit.spdx names the libraries.
#
# Runs once: it reads only the files.
use RatelimitTest;
use File::Basename;
use File::Find;
use File::Path qw(make_path);
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
	return map { my $file = $_; map { "$file: $_" } grep { $_ ne $version } slurp_file("$root/$file") =~ /\bratelimit(?:--|-| )v?(\d+(?:\.\d+)++)(?!--)/g } @_;
}

like($version, qr/^\d+\.\d+\.\d+$/, "the control file: $version is a semantic version");

my $meta = decode_json(slurp_file("$root/META.json"));
my $provided = $meta->{provides}{ratelimit};
is($meta->{version}, $version, 'META.json: the version of the distribution');
is($provided->{version}, $version, 'META.json: the version of the extension');
is($provided->{file}, "sql/ratelimit--$version.sql", 'META.json: the file');
ok(-f "$root/$provided->{$_}", "META.json: there is $provided->{$_}") foreach 'file', 'docfile';

# PGXN's schema wants an address, and with "url" the type.
my $place = $meta->{resources}{repository};
ok(!$place || $place->{web} || $place->{url} && $place->{type}, 'META.json: the repository has an address, or is left out');

is((captured(qr/^## (\S+)/m, 'CHANGELOG.md'))[0], $version, 'CHANGELOG.md: the first heading');
SKIP:
{
	skip 'there is no debian/changelog' unless -f "$root/debian/changelog";
	is((captured(qr/\A\S+ \((?:\d+:)?([^)]*)-[^-)]+\)/, 'debian/changelog'))[0], $version, 'debian/changelog: the first line');
}

my @pages = files('README.md', 'CONTRIBUTING.md', 'SECURITY.md', 'ratelimit.spdx', 'docs', 'src/README.md', 'script', 'demo');
cmp_ok(scalar @pages, '>', 20, 'pages and scripts: ' . @pages . ' files');
is(join("\n", others(@pages)), '', 'pages and scripts name no other version');
is(join("\n", grep { captured(qr/(?<![\d.])\Q$version\E(?![\d.])/, $_) } files('Makefile', 'src', 'script')), '',
	'sources, the Makefile and scripts do not repeat the version');

# The variables of the make that runs this test.
delete @ENV{qw(MAKEFLAGS MAKELEVEL MAKEOVERRIDES MFLAGS)};
chomp(my $pg_config = qx(pg_config --bindir));
like(scalar qx(make -s -n -C "$root" -W src/ratelimit.c PG_CONFIG="$pg_config/pg_config" src/ratelimit.o), qr/-DRL_VERSION='"\Q$version\E"'/,
	'the Makefile passes the version to the compiler');

#
# script/metadata
#

# Returns the exit status and the output of script/metadata in a folder.
sub metadata
{
	my ($folder, @arguments) = @_;
	my $output = '';

	IPC::Run::run([ "$folder/script/metadata", @arguments ], '>&', \$output);
	return ($? >> 8) . "\n$output";
}

# Returns the texts of the files that script/metadata uses, by name.
sub texts
{
	my ($folder) = @_;

	return map { ($_ => slurp_file("$folder/$_")) } 'META.json', 'ratelimit.spdx', map { "debian/$_" } qw(changelog control control.in copyright watch);
}

SKIP:
{
	skip 'there is no debian/' unless -d "$root/debian";
	is(metadata($root, '--check'), "0\n", 'ratelimit.spdx and debian/ have what META.json says');

	# A release: one edit.
	my $copy = PostgreSQL::Test::Utils::tempdir;
	my %before = texts($root);
	my %released = (homepage => 'https://h.example', repository => { url => 'https://g.example/r.git', web => 'https://w.example/r', type => 'git' });

	$meta->{maintainer} = 'Ada Bo <ada@m.example>';
	$meta->{resources} = \%released;
	$before{'META.json'} = JSON::PP->new->pretty->encode($meta);
	$before{'script/metadata'} = slurp_file("$root/script/metadata");
	foreach my $file (keys %before)
	{
		make_path("$copy/" . dirname($file));
		append_to_file("$copy/$file", $before{$file});
	}
	chmod 0755, "$copy/script/metadata" or die "chmod: $!";
	my $changed = join '', map { "$_\n" } sort grep { !/META|script/ } keys %before;
	is(metadata($copy, '--check'), "1\n$changed", 'with addresses: each file has to change');
	is(metadata($copy), "0\n$changed", 'each file changes');
	is(metadata($copy), "0\n", 'and not again');
	my %after = texts($copy);
	is(join(' ', grep { $after{$_} =~ /\.invalid/ } sort keys %after), '', 'there is no placeholder left');
	foreach (
		[ 'debian/changelog', ' -- Ada Bo <ada@m.example>  ' ],
		(map { [ $_, "Maintainer: Ada Bo <ada\@m.example>\n", "Homepage: https://h.example\nVcs-Browser: https://w.example/r\nVcs-Git: https://g.example/r.git\n\n" ] }
			'debian/control', 'debian/control.in'),
		[ 'debian/copyright', "Upstream-Contact: Ada Bo <ada\@m.example>\nSource: https://h.example\n\n" ],
		[ 'debian/watch', 'https://g.example/r.git refs/tags/v([\d.]+)' ],
		[ 'ratelimit.spdx', 'Organization: Ada Bo (ada@m.example)', "git+https://g.example/r.git\@v$version\n", "https://h.example/spdx/ratelimit-$version\n" ])
	{
		my ($file, @texts) = @$_;

		ok(index($after{$file}, $_) >= 0, "$file has " . s/\n/ /gr) foreach @texts;
	}
	unlink "$copy/META.json";
	append_to_file("$copy/META.json", slurp_file("$root/META.json"));
	metadata($copy);
	%after = texts($copy);
	is(join(' ', grep { $after{$_} ne slurp_file("$root/$_") } sort keys %after), '', 'without them, the files are as before');
}

# The parts
my %part_of = ('libhiredis' => 'hiredis', 'libssl' => 'OpenSSL', 'libcrypto' => 'OpenSSL');
my %linked = map { (($part_of{$_} // $_) => 1) } grep { $_ ne 'libc' } qx(objdump -p "$root/ratelimit.so") =~ /^\s*NEEDED\s+(\w+)\.so/mg;
is(join(' ', sort 'ratelimit', keys %linked), join(' ', sort(slurp_file("$root/ratelimit.spdx") =~ /^PackageName: (.*)/mg)), 'ratelimit.spdx has the libraries that are linked');

done_testing();
