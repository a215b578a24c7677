#!/usr/bin/env bash
#
# newcomer.bash SERVER
#
# As root in a Debian that has no package but the basic ones, with the packages of the
# extension in package/: installs these, and SERVER (redis-server or valkey-server)
# from Debian.  Checks that there is no compiler.  Then, without a network, runs
# package/page.sql, as README.md says, and writes package/page.out.  Last, installs
# the packages that debian/tests/control names, and runs debian/tests/installcheck.
# script/package runs this in a chroot.

set -euo pipefail

export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
server=$1

# try COMMAND...: prints COMMAND, and its output only if it fails.
try() {
	printf '+ %s\n' "$*"
	"$@" >/tmp/output 2>&1 || {
		cat /tmp/output
		exit 1
	}
}

as_postgres() { runuser -u postgres -- "$@"; }

page() {
	local version
	# The network has only the loopback interface, which is down.
	# shellcheck disable=SC2016 # Perl's variables
	perl -MSocket -e 'socket(my $s, AF_INET, SOCK_DGRAM, 0); $lo = pack("Z16 s x22", "lo", 1); ioctl($s, 0x8914, $lo) or die $!'
	version=$(ls /usr/lib/postgresql)
	try pg_ctlcluster "$version" main start
	if ((version < 17)); then
		echo '+ preload the library, and restart PostgreSQL'
		echo "shared_preload_libraries = 'ratelimit'" >"/etc/postgresql/$version/main/conf.d/ratelimit.conf"
		try pg_ctlcluster "$version" main restart
	fi
	try "$server" --daemonize yes --save '' --dir /tmp
	try as_postgres createdb shop
	echo '+ psql shop'
	as_postgres psql -X -q -P pager=off shop <package/page.sql >package/page.out 2>&1
	# Without shared memory, the view raises an error.
	as_postgres psql -XAt -v ON_ERROR_STOP=1 -c "SELECT 'PostgreSQL ' || current_setting('server_version')
		|| ', preloaded: \"' || current_setting('shared_preload_libraries')
		|| '\", actions counted: ' || sum(allowed + denied) FROM rl_stat" shop
	"${server%-server}-cli" SHUTDOWN NOSAVE || true
	try pg_ctlcluster "$version" main stop
}

if [[ ${2:-} == page ]]; then
	page
	exit
fi

try apt-get -q update
try apt-get -q -y -o Dpkg::Use-Pty=0 install --no-install-recommends "$server" ./package/*.deb
for program in cc gcc g++ clang tcc; do
	! type -P "$program" || exit 1
done
! dpkg-query -W -f '${db:Status-Status} ${Package}\n' 'lib*-dev' 'postgresql-server-dev-*' 2>/dev/null |
	grep '^installed' || exit 1
echo 'There is no compiler, and there are no header files.'
unshare --net bash "$0" "$server" page

wanted=$(sed -n '/^Depends:/,/^[A-Z]/{/^ /p}' debian/tests/control | grep -v '^ @,$' | tr -d '\n')
try apt-get -q -y -o Dpkg::Use-Pty=0 satisfy --no-install-recommends "${wanted%,}"
try debian/tests/installcheck
grep -E '^(###|test|ok|#) ' /tmp/output
echo 'The installed package passes its tests.'
