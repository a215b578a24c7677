# The scripts, where "make install" was run before.
use strict;
use warnings FATAL => 'all';

use File::Find;
use FindBin;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

my $root = "$FindBin::RealBin/../..";
my $bin = output_of('pg_config', '--bindir');

# What a program prints, its errors too.
sub output_of
{
	my (@command) = @_;
	my $output = '';

	IPC::Run::run(\@command, '<', \'', '>', \$output, '2>&1');
	chomp $output;
	return $output;
}

# The extension's files in the PostgreSQL that is used, and which they are.
sub installed_files
{
	my %files;

	find({ no_chdir => 1, wanted => sub { $files{$_} = join ' ', (stat)[1, 7, 9] if m{/ratelimit[^/]*$} || m{/bitcode/ratelimit/} } },
		map { output_of('pg_config', $_) } qw(--pkglibdir --sharedir));
	return \%files;
}

#
# script/demo, script/test and script/bench
#

# They begin in the same way.
my $before = installed_files();
cmp_ok(scalar grep({ m{\.(so|sql|control)$} } keys %$before), '>=', 3, 'the extension is installed');
my $begin = <<'END';
set -euo pipefail
. "$1/script/lib.sh"
set_up
find "$T/pg" ! -type d -name 'ratelimit*' -printf 'left over: %p\n'
build
[[ -f $("$PG_CONFIG" --pkglibdir)/ratelimit.so ]] && echo built
END
{
	local $ENV{PG_CONFIG} = "$bin/pg_config";
	my $output = output_of('bash', '-c', $begin, 'script', $root);

	like($output, qr/^built$/m, 'a script builds and installs') or diag $output;
	unlike($output, qr/^left over/m, 'its own PostgreSQL has nothing of what is installed');
	is_deeply(installed_files(), $before, 'which stays as it is');
}

done_testing();
