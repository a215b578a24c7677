# The scripts and the Makefile, after "make install" and as root.
#
# Runs once: each row builds, and no server is asked.
use strict;
use warnings FATAL => 'all';

use File::Find;
use FindBin;
use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

my $root = "$FindBin::RealBin/../..";
my $bin = output_of('pg_config', '--bindir');

# The variables of the make that runs this test.
delete @ENV{qw(MAKEFLAGS MAKELEVEL MAKEOVERRIDES MFLAGS)};
# It builds several times, and runs little of it.
$ENV{COPT} = '-O0';

# Returns a program's output, including its errors.
sub output_of
{
	my (@command) = @_;
	my $output = '';

	IPC::Run::run(\@command, '<', \'', '>', \$output, '2>&1');
	chomp $output;
	return $output;
}

# Returns the extension's files in the PostgreSQL that is used, with their inodes,
# sizes and times.
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

# These scripts begin in the same way.  In the everyday form, the objects are those of this folder.
my $before = installed_files();
cmp_ok(scalar grep({ m{\.(so|sql|control)$} } keys %$before), '>=', 3, 'the extension is installed');
my $begin = <<'END';
set -euo pipefail
. "$1/script/lib.sh"
set_up
find "$T/pg" ! -type d -name 'ratelimit*' -printf 'left over: %p\n'
[[ -n ${RATELIMIT_LONG:-} ]] || run cp -a "$1/src" "$SRC"
build with_llvm=no
[[ -f $("$PG_CONFIG" --pkglibdir)/ratelimit.so ]] && echo built
END
# Then a checkout is built, built again, and built at another commit, in the same sources.
my $checkout = <<'END';
commit() {
	run git -C "$SRC" add src/sql/status.c
	run git -C "$SRC" -c user.name=test -c user.email=test@localhost commit -q --allow-empty -m "$1"
}
# objects TEXT...: builds two objects, and prints whether a text is in the first, and the times of both.
objects() {
	run make -s -C "$SRC" with_llvm=no src/sql/status.o src/sql/key.o
	for text; do grep -qF "$text" "$SRC/src/sql/status.o" && echo "has $text"; done || true
	date -r "$SRC/src/sql/status.o" '+status %s.%N'
	date -r "$SRC/src/sql/key.o" '+key %s.%N'
}
objects
run git init -q "$SRC"
commit first
for again in 1 2; do objects "($("${AS[@]}" git -C "$SRC" describe --always))"; done
commit second
run git -C "$SRC" tag v1.2 HEAD~
objects '(v1.2-1-g'
RL_COMMIT='' objects '(v1.2-1-g'
END
my $has_git = output_of('sh', '-c', 'command -v git');
my $output;
{
	local $ENV{PG_CONFIG} = "$bin/pg_config";
	$output = output_of('bash', '-c', $begin . ($has_git ? $checkout : ''), 'script', $root);

	like($output, qr/^built$/m, 'a script builds and installs') or diag $output;
	unlike($output, qr/^left over/m, 'its private PostgreSQL has no file of the installed extension');
	is_deeply(installed_files(), $before, 'the installed files are unchanged');
}

#
# A build in another folder
#

# VPATH as pg_buildext gives it, and without.  The second folder is outside the sources.  One object of
# each folder is compiled there, and those with a header that make writes; the others are those of the
# sources.  Only in the long form.
my $elsewhere = <<'END';
set -euo pipefail
. "$1/script/lib.sh"
set_up
build with_llvm=no DESTDIR="$T/expected"
run cp -a "$SRC" "$T/objects"
run make -s -C "$SRC" with_llvm=no clean
find "$SRC" | sort >"$T/before"
for folder in "$SRC/build" "$T/build"; do
	run mkdir "$folder"
	makefile=$SRC/Makefile
	[[ $folder != "$SRC/build" ]] || makefile=../Makefile
	args=(-s -j2 -C "$folder" -f "$makefile" with_llvm=no)
	[[ $folder != "$T/build" ]] || args+=("VPATH=$SRC")
	run make "${args[@]}" src/decide.o src/algorithm/siphash.o src/redis/scripts.o src/shared/clock.o src/sql/status.o
	run tar -C "$T/objects" -cf "$T/objects.tar" --exclude='*.[^o]*' src
	run tar -C "$folder" --skip-old-files -xf "$T/objects.tar"
	run make "${args[@]}" "DESTDIR=$T/installed" install
	diff <(cd "$T/expected" && find . -type f | sort) <(cd "$T/installed" && find . -type f | sort) && echo same files
	run rm -r "$T/installed"
done
find "$SRC" ! -path "$SRC/build*" | sort | cmp "$T/before" && echo clean sources
run make "${args[@]}" install
start_redis
start_postgres
run env RATELIMIT_REDIS_URL="$REDIS_UNIX_URL" make "${args[@]}" TAP_TESTS= REGRESS='setup type' installcheck && echo tested
redis FLUSHALL
sql -c "LOAD 'ratelimit'" -c "ALTER SYSTEM SET ratelimit.redis_url = '$REDIS_UNIX_URL'" -c 'SELECT pg_reload_conf()'
own=(env -u RATELIMIT_REDIS_URL make "${args[@]}" TAP_TESTS= REGRESS='setup throttle inspect teardown' installcheck)
run "${own[@]}" && echo "tested with the server's Redis, $(redis DBSIZE) keys are left"
stop_redis
run "${own[@]}" || echo 'failed without Redis'
run make "${args[@]}" clean
[[ -e $SRC/expected/type.out && -z $(find "$T/build" ! -type d) ]] && echo cleaned
END
if ($ENV{RATELIMIT_LONG})
{
	local $ENV{PG_CONFIG} = "$bin/pg_config";
	my $output = output_of('bash', '-c', $elsewhere, 'script', $root);

	is(() = $output =~ /^same files$/mg, 2, 'builds in other folders install the same files') or diag $output;
	like($output, qr/^clean sources$/m, 'they write nothing into the sources') or diag $output;
	like($output, qr/^tested$/m, 'make installcheck runs in another folder') or diag $output;
	like($output, qr/^tested with the server's Redis, 0 keys are left$/m, 'by default it uses the Redis of the server, and deletes its keys') or diag $output;
	like($output, qr/^tested with[^\n]*\n(?:psql[^\n]*NOTICE[^\n]*\n)*psql:[^\n]*ERROR:  could not connect to Redis[^\n]*\n(?:DETAIL[^\n]*\n)?(?:HINT[^\n]*\n)?make[^\n]*Error 3\nfailed without Redis$/m,
		'without Redis it fails at once, with the reason') or diag $output;
	like($output, qr/^cleaned$/m, 'make clean removes all files there, and none of the sources') or diag $output;
}

#
# The commit
#

SKIP:
{
	skip 'there is no git', 1 unless $has_git;
	my @built = $output =~ /^((?:has .*\n)*)status (.*)\nkey (.*)$/mg;

	is(join('', map { $_ // '' } @built[ 0, 3, 6, 9, 12 ]) =~ s/[0-9a-f]{7,}/ID/gr,
		"has (ID)\nhas (ID)\nhas (v1.2-1-g\n", 'a build in a checkout has its commit, and no other build') or diag $output;
	is($built[7], $built[4], 'nothing is compiled again at the same commit');
	isnt($built[10], $built[7], 'rl_status is compiled again at another commit');
	is_deeply([ @built[ 5, 8, 11, 14 ] ], [ ($built[2]) x 4 ], 'and no other object is');
}

#
# make installcheck
#

# make -n only shows the commands.
my @check = ('make', '-n', '-C', $root, "PG_CONFIG=$bin/pg_config", 'installcheck');
my $as_user = output_of(@check);
like($as_user, qr/pg_regress.*^.*\bprove\b/ms, 'both kinds of tests are run');
unlike($as_user, qr/root/, 'there is no message about root');
{
	my $dir = PostgreSQL::Test::Utils::tempdir;

	append_to_file("$dir/id", "#!/bin/sh\necho 0\n");
	chmod 0755, "$dir/id";
	local $ENV{PATH} = "$dir:$ENV{PATH}";
	my $as_root = output_of(@check);

	like($as_root, qr/TAP tests.*root.*pg_regress/s, 'as root the first message is that TAP tests are left out');
	unlike($as_root, qr/\bprove\b/, 'as root TAP tests are left out');
}

done_testing();
