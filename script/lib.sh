# shellcheck shell=bash
#
# The parts that script/demo, script/test, script/mutate, script/bench, script/prove and
# script/package share: packages, a temporary folder with a private copy of the sources and of
# PostgreSQL, and private servers in it.  Source this file under "set -euo pipefail", then call
# set_up once.  When the script ends, in whatever way, the servers are stopped and
# the folder is removed.
#
#   say TEXT...              prints a line of progress
#   die TEXT...              prints an error line, and ends the script with status 2
#   set_up [PACKAGE...]      installs the basic packages and these, if they are missing
#                            (% in a name is PostgreSQL's version); makes $T, and
#                            in it $SRC, the PostgreSQL tree and $REDIS_SERVER
#   sources                  writes the sources to standard output, as tar does
#   build [MAKE_ARG...]      runs make and make install into the private tree, and says how long it took
#   expect_local             changes the outputs that pg_regress expects to those of the local store
#   tap_test NAME[,local] [NAME=VALUE...]  runs a TAP test in $SRC with this environment, and with
#                            Redis or the local store; as "${AS[@]}" does
#   preload_asan LIBRARY     prints LD_PRELOAD for a server whose extension has AddressSanitizer
#   run COMMAND...           runs COMMAND as the unprivileged user in $T, in a process
#                            group of its own that ends with the script; returns its
#                            status.  Not for pipes and $( ): a subshell cannot clean up.
#   start COMMAND..., finish the two halves of run, as the caller's user; one at a time
#   "${AS[@]}" COMMAND...    runs COMMAND as the unprivileged user in the foreground,
#                            and keeps its standard input; also in pipes
#   start_redis              starts Redis, or starts it again, at the same addresses
#   stop_redis               stops Redis; its data is lost
#   redis ARG...             runs redis-cli
#   start_postgres [NAME=VALUE...]  starts a cluster with these settings, or starts it again
#   stop_postgres            stops the cluster (fast shutdown)
#   sql [PSQL_ARG...]        runs psql: quiet, and it stops at the first error
#   at_end                   a script may define it; it runs first when the script ends
#   new_folder               makes $FOLDER for in_chroot, with the sources in $FOLDER/tmp/src
#   in_chroot NAME SERVERS LOG COMMAND...  runs COMMAND by script/chroot, on $FOLDER/tmp.
#                            Prints its output, and writes it to LOG.  Does not return its status.
#   remove_folder            removes $FOLDER
#
# After set_up:  T (temporary folder, owned by the unprivileged user), SRC,
# BIN (PostgreSQL's programs), PG_CONFIG, PG_MAJOR, REDIS_SERVER, REDIS_CLI,
# REDIS_BENCHMARK, VERSIONS (in words).  After start_redis:  REDIS_PID, REDIS_PORT, REDIS_SOCKET,
# REDIS_TCP_URL, REDIS_UNIX_URL.  After start_postgres:  PGHOST (a folder),
# PGPORT, PGUSER=postgres, PGDATABASE are exported.  POSTGRES_ENV may hold
# NAME=VALUE pairs for the server's environment.
#
# Two variables of the environment have precedence over the programs that are
# found: REDIS_SERVER (a program such as valkey-server), and PG_CONFIG (of the
# PostgreSQL to use).

# Further packages that the tests use.
# shellcheck disable=SC2034 # for the scripts
TEST_PACKAGES=(libipc-run-perl strace libssl-dev lua-check original-awk openssl pgbouncer)

# Further packages that build Debian packages.
# shellcheck disable=SC2034 # for the scripts
BUILD_PACKAGES=(build-essential debhelper lintian postgresql-server-dev-all libssl-dev)

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
	# The first comment of the script, unless the script has more to say.
	grep -q '^usage()' "$0" || exec sed -n '3,/^[^#]*$/s/^# \{0,1\}//p' "$0"
fi

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
T='' AS=() POSTGRES_ENV=() TAP_FOLDER='' TAP_COMMAND=''
CHILD='' REDIS_PID='' REDIS_PORT='' POSTGRES_UP='' HELD=()
FOLDER='' LIFELINE='' ELSEWHERE=''

PG_CONFIG=${PG_CONFIG:-}
REDIS_SERVER=${REDIS_SERVER:-}
for name in "${!PG@}"; do
	# The names of libpq's variables have no underscore after PG.
	[[ $name == PG_* ]] || unset "$name"
done
unset MAKEFLAGS MAKELEVEL CDPATH
export LC_ALL=C.UTF-8
[[ -z ${RATELIMIT_KEEP:-} ]] || export PG_TEST_NOCLEAN=1
umask 022

if [[ -t 1 ]]; then BOLD=$'\e[1m' PLAIN=$'\e[0m'; else BOLD='' PLAIN=''; fi

say() { printf '%s==> %s%s\n' "$BOLD" "$*" "$PLAIN"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 2; }

#
# The end
#

at_end() { :; }

clean_up() {
	local status=$?
	trap - EXIT
	trap '' INT TERM HUP
	set +e
	at_end
	if [[ -n $LIFELINE ]]; then
		# script/chroot ends when its standard input is closed.
		exec {LIFELINE}>&-
		wait "$ELSEWHERE"
	fi
	[[ -z $FOLDER ]] || remove_folder
	release_services
	if [[ -n $CHILD ]]; then
		kill -TERM -- "-$CHILD" 2>/dev/null
		wait "$CHILD" 2>/dev/null
	fi
	if [[ -n $T ]]; then
		end_servers TERM QUIT
		if [[ -n ${RATELIMIT_KEEP:-} ]]; then say_kept; else rm -rf "$T"; fi
	fi
	exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# Says what is in the folder that RATELIMIT_KEEP keeps.
say_kept() {
	say "kept: $T"
	find "$T" \( -path '*/tmp_check/log/*' -o -name regression.diffs -o -name postgres.log -o -path "$T/redis/log" \) -type f -size +0 | sort | sed 's/^/    /'
}

# Lists the servers whose working directory is in $T, also those of a killed test.
servers() {
	local pid name
	# One program for all processes: a busy machine has thousands.
	find /proc/[0-9]*/cwd -maxdepth 0 \( -lname "$T" -o -lname "$T/*" \) 2>/dev/null | while IFS=/ read -r _ _ pid _; do
		{ read -r name <"/proc/$pid/comm"; } 2>/dev/null || continue
		case $name in
			postgres | redis-* | valkey-* | prometheus*) echo "$pid $name" ;;
		esac
	done
}

end_servers() {
	local deadline=$((SECONDS + 10)) pid name list
	list=$(servers)
	while read -r pid name; do
		[[ -n $pid ]] || continue
		# A paused server handles no signal except KILL until it continues.
		kill -CONT "$pid" 2>/dev/null
		if [[ $name == postgres ]]; then kill "-$2" "$pid"; else kill "-$1" "$pid"; fi 2>/dev/null
	done <<<"$list"
	while list=$(servers) && [[ -n $list ]]; do
		if ((SECONDS >= deadline)); then
			while read -r pid name; do kill -KILL "$pid" 2>/dev/null; done <<<"$list"
		fi
		sleep 0.05
	done
	[[ -z $REDIS_PID ]] || wait "$REDIS_PID" 2>/dev/null
}

#
# Packages
#

as_root() { if ((EUID == 0)); then "$@"; else sudo "$@"; fi; }

# The installation of a server must neither start it nor make a cluster.
hold_services() {
	if [[ ! -e /usr/sbin/policy-rc.d ]]; then
		HELD+=(/usr/sbin/policy-rc.d)
		printf '#!/bin/sh\nexit 101\n' | as_root tee /usr/sbin/policy-rc.d >/dev/null
		as_root chmod 755 /usr/sbin/policy-rc.d
	fi
}

hold_cluster() {
	local file=/etc/postgresql-common/createcluster.d/ratelimit-setup.conf
	HELD+=("$file")
	as_root mkdir -p "${file%/*}"
	echo 'create_main_cluster = false' | as_root tee "$file" >/dev/null
}

# disable_services PACKAGE...: keeps the services of packages that were installed just now
# from starting with the machine.
disable_services() {
	local units
	mapfile -t units < <(dpkg-query -L "$@" | sed -nE 's:^(/usr)?/lib/systemd/system/([^@]+\.service)$:\2:p')
	if ((${#units[@]})) && command -v systemctl >/dev/null; then as_root systemctl --quiet disable "${units[@]}"; fi
}

release_services() {
	((${#HELD[@]})) || return 0
	as_root rm -f "${HELD[@]}"
	HELD=()
}

installed() {
	[[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# Its output is in a log, so this prints a line for how long it took.
apt() {
	local begin=$SECONDS
	# shellcheck disable=SC2024 # the log belongs to the caller, not to root
	as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
		apt-get -q -y -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0 "$@" >"$T/apt.log" 2>&1 </dev/null || {
		cat "$T/apt.log" >&2
		die "apt-get $1 failed"
	}
	printf '    %d s\n' $((SECONDS - begin))
}

# Prints the highest installed version from 15 on.  A version with its server
# headers comes before all versions without.
installed_version() {
	local folder n best=0 complete=0
	for folder in /usr/lib/postgresql/*; do
		n=${folder##*/}
		if [[ ! -x $folder/bin/postgres || ! $n =~ ^[0-9]+$ || $n -lt 15 ]]; then continue; fi
		((n <= best)) || best=$n
		if ((n > complete)) && installed "postgresql-server-dev-$n"; then complete=$n; fi
	done
	if ((complete)); then echo "$complete"; elif ((best)); then echo "$best"; fi
}

packages() {
	local updated='' package wanted missing=()
	if ! command -v dpkg-query >/dev/null; then
		[[ -n $PG_CONFIG ]] || PG_CONFIG=$(command -v pg_config) || die 'install PostgreSQL with its server headers, or set PG_CONFIG'
		return
	fi
	if [[ -n $PG_CONFIG ]]; then
		PG_MAJOR=$("$PG_CONFIG" --version | sed -E 's/^[^0-9]*([0-9]+).*/\1/')
		wanted=()
	else
		PG_MAJOR=$(installed_version)
		if [[ -z $PG_MAJOR ]]; then
			((EUID == 0)) || command -v sudo >/dev/null || die 'no PostgreSQL 15 or later is installed, and only root can install one'
			say 'apt-get update'
			apt update
			updated=yes
			PG_MAJOR=$(apt-cache show postgresql | sed -nE 's/^Depends:.*postgresql-([0-9]+).*/\1/p' | sort -n | tail -n 1)
			[[ -n $PG_MAJOR ]] || die 'apt knows no package postgresql'
		fi
		PG_CONFIG=/usr/lib/postgresql/$PG_MAJOR/bin/pg_config
		wanted=("postgresql-$PG_MAJOR" "postgresql-server-dev-$PG_MAJOR")
	fi
	wanted+=(libhiredis-dev gcc libc6-dev make)
	# The -tools package also has the server's program, and enables no service.
	if [[ -z $REDIS_SERVER ]]; then
		REDIS_SERVER=$(command -v redis-server || command -v valkey-server || echo redis-server)
	fi
	if ! command -v "$REDIS_SERVER" >/dev/null; then
		package=${REDIS_SERVER##*/}
		wanted+=("${package%-server}-tools")
	fi
	wanted+=("${@//%/$PG_MAJOR}")

	for package in "${wanted[@]}"; do
		installed "$package" || missing+=("$package")
	done
	((${#missing[@]})) || return 0
	((EUID == 0)) || command -v sudo >/dev/null || die "missing packages, which only root can install: ${missing[*]}"
	if [[ -z $updated ]]; then
		say 'apt-get update'
		apt update
	fi
	say "apt-get install ${missing[*]}"
	hold_services
	if ! installed "postgresql-$PG_MAJOR"; then
		apt install --no-install-recommends postgresql-common
		hold_cluster
	fi
	apt install --no-install-recommends "${missing[@]}"
	disable_services "${missing[@]}"
	release_services
}

#
# The temporary folder
#

# PostgreSQL does not run as root.
choose_user() {
	local user=nobody
	if ((EUID == 0)); then
		AS=(setpriv "--reuid=$user" "--regid=$(id -g "$user")" --clear-groups)
		chown "$user:$(id -g "$user")" "$T"
	fi
	AS+=(env -C "$T" "HOME=$T/home" "TMPDIR=$T/tmp")
	"${AS[@]}" mkdir home tmp bin run redis
}

sources() {
	{
		git -c safe.directory='*' -C "$ROOT" ls-files -z --cached --others --exclude-standard 2>/dev/null ||
			(cd "$ROOT" && find . -path ./.git -prune -o -type f -print0)
	} | (cd "$ROOT" && while IFS= read -r -d '' file; do
		if [[ -e $file ]]; then printf '%s\0' "$file"; fi
	done) | tar -C "$ROOT" --null --no-recursion -T - -cf -
}

copy_sources() {
	SRC=$T/src
	"${AS[@]}" mkdir src
	sources | "${AS[@]}" tar -C src -xf - --no-same-owner
}

# Makes a link in the private tree to each entry of a folder.
link_entries() {
	local to=$T/pg$1
	"${AS[@]}" mkdir -p "$to"
	"${AS[@]}" ln -s -t "$to" "$1"/*
}

# Replaces a link to a folder by a folder of links, in which files can be installed.
unfold() {
	[[ -L $T/pg$1 ]] || return 0
	"${AS[@]}" rm "$T/pg$1"
	link_entries "$1"
}

# Makes the private tree of PostgreSQL, without files that an earlier "make install"
# wrote into the system.  PostgreSQL finds its files relative to its programs.  So
# the programs are copied, the rest is linked, and "make install" writes here and
# not into the system.
private_tree() {
	local pkglib share folder
	[[ -x $PG_CONFIG ]] || die "$PG_CONFIG is no program"
	[[ -f $("$PG_CONFIG" --pgxs) ]] || die "PostgreSQL's server headers are not installed"
	BIN=$("$PG_CONFIG" --bindir)
	pkglib=$("$PG_CONFIG" --pkglibdir)
	share=$("$PG_CONFIG" --sharedir)
	"${AS[@]}" mkdir -p "$T/pg$BIN"
	"${AS[@]}" cp -L -t "$T/pg$BIN" "$BIN"/*
	link_entries "$pkglib"
	unfold "$pkglib/bitcode"
	link_entries "$share"
	unfold "$share/extension"
	"${AS[@]}" rm -f "$T/pg$pkglib"/{ratelimit.so,bitcode/ratelimit,bitcode/ratelimit.index.bc} \
		"$T/pg$share"/extension/ratelimit{.control,--*.sql}
	for folder in "$("$PG_CONFIG" --includedir)" "$("$PG_CONFIG" --includedir-server)" "$("$PG_CONFIG" --libdir)"; do
		[[ -d $folder && ! -e $T/pg$folder ]] || continue
		"${AS[@]}" mkdir -p "$T/pg${folder%/*}"
		"${AS[@]}" ln -s "$folder" "$T/pg$folder"
	done
	BIN=$T/pg$BIN
	PG_CONFIG=$BIN/pg_config
	[[ $("$PG_CONFIG" --pkglibdir) == "$T/pg$pkglib" ]] || die 'this PostgreSQL cannot be moved'
	export PG_CONFIG
}

find_redis() {
	local kind=${REDIS_SERVER##*/} check
	kind=${kind%-server}
	if ! command -v "$REDIS_SERVER" >/dev/null; then
		# The same program is the server and the check tool, by the name that it is
		# called by.  The package of the server adds only that name and a service.
		check=$(command -v "$kind-check-rdb") || die "no $REDIS_SERVER"
		"${AS[@]}" ln -s "$check" "$T/bin/$kind-server"
	fi
	export PATH=$T/bin:$PATH
	REDIS_SERVER=$(command -v "${REDIS_SERVER}")
	REDIS_CLI=$(command -v "$kind-cli" || command -v redis-cli || command -v valkey-cli) || die 'no redis-cli'
	# shellcheck disable=SC2034 # script/bench's
	REDIS_BENCHMARK=$(command -v "$kind-benchmark" || command -v redis-benchmark || command -v valkey-benchmark || true)
	export REDIS_SERVER
}

hiredis_version() {
	printf '%s\n' '#include <hiredis/hiredis.h>' 'version HIREDIS_MAJOR HIREDIS_MINOR HIREDIS_PATCH' |
		gcc -E -P - | sed -n 's/^version //p' | tr ' ' .
}

set_up() {
	T=$(mktemp -d /tmp/ratelimit.XXXXXX)
	packages "$@"
	choose_user
	copy_sources
	private_tree
	PG_MAJOR=$("$PG_CONFIG" --version | sed -E 's/^[^0-9]*([0-9]+).*/\1/')
	find_redis
	VERSIONS=$("$PG_CONFIG" --version | sed 's/ (.*//')
	[[ $("$PG_CONFIG" --configure) != *--enable-cassert* ]] || VERSIONS+=' with assertions'
	VERSIONS+=", $("${AS[@]}" "$REDIS_SERVER" --version | sed -E 's/^([A-Za-z]+) server v=([^ ]+).*/\1 \2/')"
	VERSIONS+=", hiredis $(hiredis_version)"
	say "$VERSIONS, in $T"
}

# Starts COMMAND.  Job control gives it a process group of its own.
start() {
	set -m
	"$@" </dev/null &
	CHILD=$!
	set +m
}

finish() {
	local status=0
	wait "$CHILD" || status=$?
	CHILD=''
	return "$status"
}

run() {
	start "${AS[@]}" "$@"
	finish
}

build() {
	local log=$T/build.log begin=$SECONDS
	say 'make, make install'
	run make -C "$SRC" -j"$(nproc)" PG_CONFIG="$PG_CONFIG" "$@" >"$log" 2>&1 &&
		run make -C "$SRC" PG_CONFIG="$PG_CONFIG" "$@" install >>"$log" 2>&1 && printf '    %d s\n' $((SECONDS - begin)) && return
	cat "$log" >&2
	return 1
}

# The local store's answers differ from those of Redis only in the column "source".  The
# default of the setting stays "redis".
expect_local() { run sed -i -E '/ratelimit\.store/!s/(^|[ ,(|])redis($|[ ,)|"])/\1local\2/g' "$SRC"/expected/*.out; }

tap_test() {
	local name=${1%,*} store=redis file
	[[ $1 == "$name" ]] || store=local
	shift
	file=$(cd "$SRC" && echo test/*/"$name.pl")
	# make takes half a second to find its command, so it is asked once for each folder.  prove would take a
	# third of a second to tell what perl's output and exit status say.
	if [[ $TAP_FOLDER != "$SRC" ]]; then
		TAP_COMMAND=$("${AS[@]}" make -s -n -C "$SRC" PG_CONFIG="$PG_CONFIG" with_tls=no installcheck REGRESS= 'PROVE_TESTS="$$0"' PROVE_FLAGS='-I test/t' PROVE=perl) || return
		TAP_FOLDER=$SRC
	fi
	"${AS[@]}" env -C "$SRC" RATELIMIT_STORE="$store" RATELIMIT_TEMPLATE="$T/template" PGCTLTIMEOUT=600 \
		"PG_TEST_TIMEOUT_DEFAULT=${PG_TEST_TIMEOUT_DEFAULT:-600}" "$@" sh -c "$TAP_COMMAND" "$file"
}

# If a constructor of libp11-kit starts AddressSanitizer, it deadlocks.  So an earlier
# constructor starts it.
preload_asan() {
	gcc -x c -shared -fPIC -Wl,-z,initfirst -o "$T/wake.so" - <<<'
		__attribute__((constructor)) static void wake(void)
		{ void *volatile p = __builtin_malloc(1); __builtin_free(p); }' || return 1
	echo "$1 $T/wake.so"
}

#
# The servers
#

# median [FILE]: prints the median of numbers, one a line.
median() { sort -g "$@" | awk '{ v[NR] = $1 } END { if (NR) print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2 }'; }

# await SECONDS COMMAND...
await() {
	local deadline=$((SECONDS + $1))
	shift
	until "$@"; do
		((SECONDS < deadline)) || return 1
		sleep 0.02
	done
}

redis() { "${AS[@]}" "$REDIS_CLI" -s "$REDIS_SOCKET" "$@"; }
redis_alive() { kill -0 "$REDIS_PID" 2>/dev/null; }
redis_answers() { ! redis_alive || [[ $(redis PING 2>/dev/null) == PONG ]]; }

free_port() {
	local port
	while port=$((20000 + RANDOM % 10000)); do
		(: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
	done
	echo "$port"
}

start_redis() {
	local attempt port=${REDIS_PORT:-}
	REDIS_SOCKET=$T/redis/socket
	for attempt in 1 2 3 4 5; do
		REDIS_PORT=${port:-$(free_port)}
		set -m
		"${AS[@]}" "$REDIS_SERVER" --bind 127.0.0.1 --port "$REDIS_PORT" \
			--unixsocket "$REDIS_SOCKET" --unixsocketperm 700 \
			--dir "$T/redis" --save '' --appendonly no --daemonize no >"$T/redis/log" 2>&1 </dev/null &
		REDIS_PID=$!
		set +m
		await 120 redis_answers || break
		if redis_alive; then
			# shellcheck disable=SC2034 # for the scripts
			REDIS_TCP_URL=redis://127.0.0.1:$REDIS_PORT/0 REDIS_UNIX_URL=unix://$REDIS_SOCKET
			return 0
		fi
	done
	cat "$T/redis/log" >&2
	die "$REDIS_SERVER does not start (attempt $attempt)"
}

stop_redis() {
	[[ -n $REDIS_PID ]] || return 0
	kill -TERM "$REDIS_PID" 2>/dev/null || true
	wait "$REDIS_PID" 2>/dev/null || true
	REDIS_PID=''
}

start_postgres() {
	export PGHOST=$T/run PGPORT=5432 PGUSER=postgres PGDATABASE=postgres
	local setting
	if [[ ! -e $T/data/PG_VERSION ]]; then
		run "$BIN/initdb" -D "$T/data" -U postgres -A trust -E UTF8 --no-locale -N >"$T/initdb.log" 2>&1 || {
			cat "$T/initdb.log" >&2
			die 'initdb failed'
		}
	fi
	for setting in listen_addresses= "unix_socket_directories=$T/run" port=5432 "$@"; do
		printf "%s = '%s'\n" "${setting%%=*}" "${setting#*=}"
	done | "${AS[@]}" tee -a "$T/data/postgresql.conf" >/dev/null
	run env "${POSTGRES_ENV[@]}" "$BIN/pg_ctl" -D "$T/data" -l "$T/postgres.log" -s -w start || {
		cat "$T/postgres.log" >&2
		die 'PostgreSQL does not start'
	}
	POSTGRES_UP=yes
}

stop_postgres() {
	[[ -n $POSTGRES_UP ]] || return 0
	POSTGRES_UP=''
	run "$BIN/pg_ctl" -D "$T/data" -s -w -m fast stop
}

sql() { "${AS[@]}" "$BIN/psql" -X -q -P pager=off -v ON_ERROR_STOP=1 "$@"; }

#
# Chroots
#

new_folder() {
	FOLDER=$(as_root mktemp -d /tmp/ratelimit.XXXXXX) || return 1
	as_root mkdir -m 1777 "$FOLDER/tmp"
	as_root mkdir "$FOLDER/tmp/src"
	sources | as_root tar -C "$FOLDER/tmp/src" -xf - --no-same-owner
}

remove_folder() {
	as_root rm -rf --one-file-system "$FOLDER"
	FOLDER=''
}

in_chroot() {
	local name=$1 servers=$2 log=$3
	shift 3
	# This process ignores signals, so that it lives until script/chroot has ended.
	exec {LIFELINE}> >(
		trap : INT TERM HUP
		as_root "$ROOT/script/chroot" "$name" "$servers" "$FOLDER/tmp" "$@" 2>&1 | tee "$log" | sed -u 's/^/    /'
	)
	ELSEWHERE=$!
	wait "$ELSEWHERE" || true
	exec {LIFELINE}>&-
	LIFELINE=''
}
