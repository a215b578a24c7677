# shellcheck shell=bash disable=SC2153,SC2154 # cores, seconds, T and others are script/bench's
#
# For script/bench: what a lease gains.  Calls under a limit with a lease are compared
# with the same calls without it, with the local store, with SELECT 1 and with GCRA on
# a table; with Redis on a unix socket, and behind a proxy that delays each direction by
# 0.25 ms; for one key and for many; on one PostgreSQL server, and on two that share the
# limit.

LEASE_DELAY=250	# us
LEASE_COMMANDS_TARGET=60
LEASE_LOCAL_TARGET=0.85
LEASE_RIVAL_TARGET=2.2
LEASE_FAR_TARGET=0.6

# A row: who decides, by which script.
lease_hot=(select_1 local rival lease.unix direct.unix lease.far direct.far)
lease_many=(local lease.unix direct.unix lease.far direct.far)
lease_servers=(lease.unix direct.unix lease.far direct.far)
declare -A LEASE=(
	[select_1]='SELECT 1'
	[local]='local store'
	[rival]='GCRA as INSERT ... ON CONFLICT, unlogged table'
	[lease.unix]='lease, unix socket'
	[direct.unix]='no lease, unix socket'
	[lease.far]='lease, behind the proxy'
	[direct.far]='no lease, behind the proxy'
)
lease_uses=('100 equal' '100 zipf' '10000 equal' '10000 zipf')

# Starts the proxy, and a second PostgreSQL server at port 5433.
prepare_lease() {
	local socket=$T/redis/far name
	# Its name begins with redis-, so that it ends with the servers.
	"${AS[@]}" "$SRC/test/bench/redis-delay" "$socket" "$REDIS_SOCKET" "$LEASE_DELAY" &
	await 10 test -S "$socket" || die 'redis-delay does not start'
	for name in one equal zipf rare; do
		sed 's/ lease 50ms//' "$SRC/test/bench/lease_$name.sql" >"$T/direct_$name.sql"
		cp "$SRC/test/bench/lease_$name.sql" "$T/"
	done
	run "$BIN/initdb" -D "$T/data2" -U postgres -A trust -E UTF8 --no-locale -N >"$T/initdb.log" 2>&1 ||
		die 'initdb failed'
	{ cat "$T/data/postgresql.conf" && printf '%s\n' 'port = 5433' 'ratelimit.local_max_keys = 10000'; } | "${AS[@]}" tee "$T/data2/postgresql.conf" >/dev/null
	run "$BIN/pg_ctl" -D "$T/data2" -l "$T/postgres2.log" -s -w start || die 'the second PostgreSQL does not start'
	sql -p 5433 -c 'CREATE EXTENSION ratelimit' -c 'CREATE ROLE local SUPERUSER LOGIN'
	for name in 5432 5433; do
		sql -p "$name" -c 'CREATE ROLE far SUPERUSER LOGIN' -c "ALTER ROLE far SET ratelimit.redis_url = 'unix://$socket'"
	done
}

# lease_stat: prints sums of rl_stat: actions, leased and unused units, and actions that were not allowed.
lease_stat() {
	local port
	for port in 5432 5433; do
		sql -At -F ' ' -p "$port" -c "SELECT coalesce(sum(allowed), 0), coalesce(sum(leased), 0), coalesce(sum(leased_unused), 0),
			coalesce(sum(denied + failed_open + failed_closed + errors), 0) FROM rl_stat"
	done | awk '{ a += $1; l += $2; u += $3; d += $4 } END { print a, l, u, d }'
}

# lease_run NAME FILE CLIENTS KEYS [SERVERS]: measures a row, and appends to its results
# the microseconds of a transaction, the actions, the commands to Redis, and the leased
# and the unused units.  NAME is a row of the table above.
lease_run() {
	local result=$1 row=$2 file=$3 clients=$4 keys=$5 servers=${6:-1} user=postgres prefix=rl: port actions leased unused refused
	case $row in
		local) user=local ;;
		*.far) user=far ;;
	esac
	# Without a lease, the capacity is another one, so the keys are others.
	[[ $row != direct* ]] || prefix=direct:
	for port in 5432 5433; do sql -o /dev/null -p "$port" -c 'SELECT rl_stat_reset()'; done
	redis CONFIG RESETSTAT >/dev/null
	# shellcheck disable=SC2016 # bash -c has other parameters
	run_on env "PGOPTIONS=-c ratelimit.key_prefix=$prefix" bash -c '
		servers=$1
		shift
		for ((i = 0; i < servers; i++)); do
			"$@" -p $((5432 + i)) &
			pids[i]=$!
		done
		for pid in "${pids[@]}"; do wait "$pid" || exit; done' \
		lease "$servers" "$BIN/pgbench" -U "$user" -n -M prepared -D "keys=$keys" -c "$((clients / servers))" \
		-j "$((clients / servers < $(nproc) ? clients / servers : $(nproc)))" -T "$seconds" -f "$file"
	read -r actions leased unused refused < <(lease_stat)
	((refused == 0)) || die "calls were refused: ${LEASE[$row]}"
	{
		sed -nE 's/^tps = ([0-9.]+).*/\1/p' "$T/out" | awk -v c="$clients" '{ r += $1 } END { printf "%.3f ", c * 1e6 / r }'
		printf '%s %s %s ' "$actions" "$leased" "$unused"
		redis INFO commandstats | sed -nE 's/^cmdstat_(evalsha|eval):calls=([0-9]+).*/\2/p' | awk '{ n += $1 } END { print n + 0 }'
	} >>"$T/results/lease.$result"
}

# lease_file ROW USE: prints the script of a row.
lease_file() {
	case $1 in
		select_1) echo "$SRC/test/bench/select_1.sql" ;;
		rival) echo "$SRC/test/bench/rival_gcra_one.sql" ;;
		direct*) echo "$T/direct_$2.sql" ;;
		*) echo "$T/lease_$2.sql" ;;
	esac
}

# measure_lease MODE: measures one round.
measure_lease() {
	local row use clients=1
	[[ $1 != eight ]] || clients=8
	for row in "${lease_hot[@]}"; do
		lease_run "$1.one.$row" "$row" "$(lease_file "$row" one)" "$clients" 1
	done
	[[ $1 == eight ]] || return 0
	for use in "${lease_uses[@]}"; do
		for row in "${lease_many[@]}"; do
			lease_run "${use/ /.}.$row" "$row" "$(lease_file "$row" "${use#* }")" "$clients" "${use% *}"
		done
	done
	for row in "${lease_servers[@]}"; do
		lease_run "servers.$row" "$row" "$(lease_file "$row" one)" "$clients" 1 2
	done
	for row in lease.unix direct.unix; do
		lease_run "rare.$row" "$row" "$(lease_file "$row" rare)" 1 1
	done
}

# lease_median RESULT EXPRESSION: prints the median over the rounds, with us, actions,
# leased, unused and commands as in lease_run; nothing if the expression has no value.
lease_median() {
	awk "{ us = \$1; actions = \$2; leased = \$3; unused = \$4; commands = \$5; v = $2; if (v != \"\") print v }" "$T/results/lease.$1" | median
}

# lease_table TITLE RESULT CLIENTS ROW...: prints a table.
lease_table() {
	local title=$1 result=$2 clients=$3 row
	shift 3
	printf '| %-46s | %9s | %10s | %15s | %10s | %8s |\n' "$title" us 'per second' 'actions/command' 'commands/s' 'unused %'
	printf '|:%s-|%s:|%s:|%s:|%s:|%s:|\n' ---------------------------------------------- ---------- ----------- ---------------- ----------- ---------
	for row in "$@"; do
		awk -v n="${LEASE[$row]}" -v us="$(lease_median "$result.$row" us)" -v c="$clients" \
			-v a="$(lease_median "$result.$row" 'commands > 0 ? actions / commands : ""')" \
			-v r="$(lease_median "$result.$row" "actions > 0 ? commands / $seconds : \"\"")" \
			-v u="$(lease_median "$result.$row" 'leased > 0 ? 100 * unused / leased : ""')" '
			function shown(x, format) { return x == "" ? "" : sprintf(format, x) }
			BEGIN { printf "| %-46s | %9.1f | %10.0f | %15s | %10s | %8s |\n", n, us, c * 1e6 / us,
				shown(a, "%.1f"), shown(r, "%.0f"), shown(u, "%.1f") }'
	done
	echo
}

# lease_target TITLE TARGET: prints the median of the figures that it reads, and whether
# it is at least the target, or at most it if it begins with <.
lease_target() {
	sort -g | awk -v title="$1" -v target="$2" 'NR == 1 { least = $1 } { most = $1; v[NR] = $1 } END {
		figure = (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2
		up = sub(/^</, "", target)
		printf "%s: %.2f (%.2f to %.2f); target at %s %s: %s\n", title, figure, least, most, up ? "most" : "least", target,
			(up ? figure <= target : figure >= target) ? "met" : "missed" }'
}

# lease_ratio A B: prints the rate of A divided by that of B, for each round.
lease_ratio() { paste -d ' ' "$T/results/lease.$1" "$T/results/lease.$2" | awk '{ print $6 / $1 }'; }

report_lease() {
	local mode clients use at=eight.one.lease.unix
	for mode in free eight; do
		clients=1
		[[ $mode != eight ]] || clients=8
		lease_table "one key, ${MODE[$mode]}" "$mode.one" "$clients" "${lease_hot[@]}"
	done
	for use in "${lease_uses[@]}"; do
		lease_table "${use% *} keys, ${use#* } use, 8 clients" "${use/ /.}" 8 "${lease_many[@]}"
	done
	lease_table 'one key, two servers with 4 clients each' servers 8 "${lease_servers[@]}"
	echo "The calls are SELECT * FROM rl_check(key, '10000000/1s burst 5000000 lease 50ms'). The proxy delays each direction by 0.$LEASE_DELAY ms."
	echo
	echo 'One key, 8 clients, unix socket unless said otherwise; medians of the rounds:'
	lease_ratio $at eight.one.local | lease_target '- rate with a lease / local store' "$LEASE_LOCAL_TARGET"
	lease_ratio $at eight.one.rival | lease_target '- rate with a lease / INSERT ... ON CONFLICT' "$LEASE_RIVAL_TARGET"
	lease_ratio eight.one.lease.far eight.one.select_1 | lease_target '- rate with a lease behind the proxy / SELECT 1' "$LEASE_FAR_TARGET"
	awk -v s="$seconds" '{ print $5 / s }' "$T/results/lease.$at" |
		lease_target '- commands to Redis per second, with those at the start' "<$LEASE_COMMANDS_TARGET"
	awk -v s="$seconds" '{ print $5 / s / 2 }' "$T/results/lease.servers.lease.unix" |
		lease_target '- the same for each of two servers' "<$LEASE_COMMANDS_TARGET"
	awk '{ a += $2; c += $5 } END {
		printf "A key that is used every 4 ms: %d actions, %d commands to Redis; target equal: %s\n", a, c, a == c ? "met" : "missed" }' \
		"$T/results/lease.rare.lease.unix"
	echo
}
