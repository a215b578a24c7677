#!/usr/bin/env bash
#
# newcomer.bash SERVER package|volume|build|image
#
# As root in a Debian that has no package but the basic ones: installs the extension in one of
# these ways, and SERVER (redis-server or valkey-server) from Debian.
#
#   package  the packages in package/
#   volume   package/volume-N, mounted read-only beside PostgreSQL N
#   image    as the last stage of Containerfile.  Its first stage is "build", which only makes
#            the files for the last one, in /tmp/build.
#
# Checks that there is no compiler.  Then, without a network, runs each page's blocks in
# package/PAGE.sql, as README.md says, and writes package/PAGE.out.  Last, installs the packages that
# debian/tests/control names, and with "package" runs debian/tests/installcheck.
# script/package runs this in a chroot.

set -euo pipefail

export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
server=$1 way=$2
environment=() user=root command=''

# try COMMAND...: prints COMMAND, and its output only if it fails.
try() {
	printf '+ %s\n' "$*"
	"$@" >/tmp/output 2>&1 || {
		cat /tmp/output
		exit 1
	}
}

as_postgres() { runuser -u postgres -- "$@"; }

apt_install() { try apt-get -q -y -o Dpkg::Use-Pty=0 install --no-install-recommends "$@"; }

#
# The ways
#

install_package() {
	try apt-get -q update
	apt_install "$server" ./package/*.deb
}

# Mounts the volume and sets the paths as CloudNativePG does.
install_volume() {
	local folder version
	folder=$(echo package/volume-*)
	version=${folder##*-}
	try apt-get -q update
	apt_install "$server" "postgresql-$version"
	! ldconfig -p | grep hiredis || exit 1
	echo 'There is no hiredis.'
	mkdir -p /extensions/ratelimit
	try mount --bind "$folder" /extensions/ratelimit
	try mount -o remount,bind,ro /extensions/ratelimit
	! touch /extensions/ratelimit/lib/ratelimit.so 2>/dev/null || exit 1
	cat >"/etc/postgresql/$version/main/conf.d/ratelimit.conf" <<-'END'
		extension_control_path = '$system:/extensions/ratelimit/share'
		dynamic_library_path = '$libdir:/extensions/ratelimit/lib'
	END
}

# stage NAME: does what a stage of Containerfile says, with RUN, COPY, ENV and USER.  The
# last stage has no name.  Sets environment, user and command.
stage() {
	local instruction rest from words current=''
	while read -r instruction rest; do
		if [[ $instruction == FROM ]]; then
			[[ $rest =~ :trixie-slim( AS )?(.*)$ ]] || exit 1
			current=${BASH_REMATCH[2]}
			continue
		fi
		[[ $current == "$1" ]] || continue
		read -ra words <<<"$rest"
		case $instruction in
			RUN) try env -C / sh -c "$rest" ;;
			COPY)
				from=$PWD/
				if [[ ${words[0]} == --from=* ]]; then
					from=/tmp/${words[0]#--from=}
					words=("${words[@]:1}")
				fi
				mkdir -p "${words[1]}"
				# shellcheck disable=SC2086 # a pattern
				try cp -r $from${words[0]} "${words[1]}"
				;;
			ENV) environment+=("${words[@]}") ;;
			USER) user=$rest ;;
			CMD) command=$rest ;;
			VOLUME | EXPOSE | STOPSIGNAL) ;;
			*) exit 1 ;;
		esac
	done < <(sed -e :a -e '/\\$/{N;s/\\\n[[:space:]]*//;ta' -e '}' Containerfile | grep -vE '^(#|$)')
}

install_image() {
	stage ''
	[[ -n $command ]] || exit 1
	try apt-get -q update
	apt_install "$server"
}

#
# The pages
#

pages() {
	local version page
	# The network has only the loopback interface, which is down.
	# shellcheck disable=SC2016 # Perl's variables
	perl -MSocket -e 'socket(my $s, AF_INET, SOCK_DGRAM, 0); $lo = pack("Z16 s x22", "lo", 1); ioctl($s, 0x8914, $lo) or die $!'
	version=$(ls /usr/lib/postgresql)
	if ((version < 17)); then
		echo '+ preload the library'
		echo "shared_preload_libraries = 'ratelimit'" >"/etc/postgresql/$version/main/conf.d/ratelimit.conf"
	fi
	for page in package/*.sql; do page; done
}

# await PID COMMAND...: waits until COMMAND succeeds.  Fails if the process ends.
await() {
	until "${@:2}" >/dev/null 2>&1; do
		kill -0 "$1"
		sleep 0.1
	done
}

# Starts the servers, runs a page, resets the cluster, and stops the servers.
page() {
	local redis postgres=''
	if [[ -n $command ]]; then
		setpriv --reuid="$user" --regid="$user" --init-groups env -C / "${environment[@]}" sh -c "$command" >/tmp/postgres.log 2>&1 &
		postgres=$!
		await "$postgres" as_postgres pg_isready
	else
		try pg_ctlcluster "$version" main start
	fi
	"$server" --save '' --dir /tmp >/tmp/redis.log &
	redis=$!
	await "$redis" "${server%-server}-cli" PING
	try as_postgres createdb shop
	echo "+ psql shop <$page"
	# A busy machine may answer late.
	PGOPTIONS='-c ratelimit.connect_timeout=10s -c ratelimit.command_timeout=10s' \
		as_postgres psql -X -q -P pager=off shop <"$page" >"${page%.sql}.out" 2>&1
	# Without shared memory, the view raises an error.  Some pages create the extension in a schema of its own.
	as_postgres psql -XAtq -v ON_ERROR_STOP=1 shop <<-'END'
		SELECT set_config('search_path', extnamespace::regnamespace::text, false) AS path FROM pg_extension WHERE extname = 'ratelimit' \gset
		SELECT concat('PostgreSQL ', current_setting('server_version'), ', preloaded: "', current_setting('shared_preload_libraries'),
			'", actions counted: ', sum(allowed + denied)) FROM rl_stat;
	END
	try as_postgres psql -X -v ON_ERROR_STOP=1 -f test/reset.sql
	kill "$redis"
	wait "$redis"
	if [[ -n $postgres ]]; then
		kill -INT "$postgres"
		wait "$postgres"
	else
		try pg_ctlcluster "$version" main stop
	fi
}

if [[ $way == build ]]; then
	stage build
	mkdir /tmp/build
	# shellcheck disable=SC2046 # patterns
	try cp --parents -t /tmp/build $(sed -n 's/^COPY --from=build \(\S*\).*/\1/p' Containerfile)
	echo 'The first stage of the image is built.'
	exit
fi
"install_$way"
for program in cc gcc g++ clang tcc; do
	! type -P "$program" || exit 1
done
! dpkg-query -W -f '${db:Status-Status} ${Package}\n' 'lib*-dev' 'postgresql-server-dev-*' 2>/dev/null |
	grep '^installed' || exit 1
echo 'There is no compiler, and there are no header files.'
export -f pages page await try as_postgres
unshare --net bash -euo pipefail -c "$(declare -p server user command environment); pages"
if [[ $way == package ]]; then
	wanted=$(sed -n '/^Depends:/,/^[A-Z]/{/^ /p}' debian/tests/control | grep -v '^ @,$' | tr -d '\n')
	try apt-get -q -y -o Dpkg::Use-Pty=0 satisfy --no-install-recommends "${wanted%,}"
	try debian/tests/installcheck
	grep -E '^(###|test|ok|#) ' /tmp/output
fi
echo 'The installed extension passes its tests.'
