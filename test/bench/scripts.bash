# shellcheck shell=bash disable=SC2154 # rounds, seconds, SRC, T, AS, REDIS_* and words are script/bench's
#
# For script/bench: the time that Redis works on one call of each script, and the bytes
# that a replica gets for it.  redis-benchmark repeats the call that the extension sends.

# A row: the script; the ratio that is its target, or -; which EVALSHA of the SQL; the title; the SQL.
# PERIOD is ten times the time of a call, so that the log has about ten entries.
WINDOW='fixed_window 1000000000/1d from_first'
script_rows=(
	"before|-|1|throttle before steps of the expiry|SELECT rl_throttle('before', 1000000000, 1000, 1)"
	"throttle|0.85|1|throttle|SELECT rl_throttle('a throttle', 1000000000, 1000, 1)"
	"token_bucket|1.15|1|token_bucket|SELECT rl_token_bucket('a bucket', 1000000000, 1000, 1)"
	"fixed_window|1.15|1|fixed_window|SELECT rl_fixed_window('a window', 1000000000, 60)"
	"sliding_window|1.35|1|sliding_window, 60 counters|SELECT rl_sliding_window('a sliding window', 1000000000, 6, 0.1)"
	"sliding_log|1.6|1|sliding_log of about 10 entries|SELECT rl_check('a log', 'sliding_log 100000/PERIODus')"
	"mixed|3.5|1|three mixed limits|SELECT rl_check('mixed', 'sliding_log 100000/PERIODus, fixed_window 1000000000/1min, 1000000/1s burst 1000000000')"
	"two|-|1|two throttles|SELECT rl_check('two', '1000/1s burst 1000000000, 1000/2s burst 1000000000')"
	"refused|-|1|throttle, refused|SELECT rl_throttle('refused', 1, 1, 86400), rl_throttle('refused', 1, 1, 86400)"
	"window_refused|-|1|fixed_window, refused|SELECT rl_fixed_window('window', 1, 86400), rl_fixed_window('window', 1, 86400)"
	"two_refused|-|1|two throttles, refused|SELECT rl_check('two refused', '1/1d, 1/1h'), rl_check('two refused', '1/1d, 1/1h')"
	"count_denied|-|1|fixed_window with count_denied|SELECT rl_check('denied', '$WINDOW count_denied')"
	"check_all|-|1|two keys, a throttle each (check_all.lua)|SELECT FROM rl_check_all('{one,other}', '{1000/1s burst 1000000000,1000/1s burst 1000000000}')"
	"peek|-|1|rl_peek of a throttle|SELECT rl_peek('a throttle', '1000/1s burst 1000000000')"
	"refund|-|2|rl_refund|SELECT rl_check('refund', '$WINDOW', 500000000); SELECT rl_refund('refund', '$WINDOW', 1)"
	"reset|-|1|rl_reset of a limit|SELECT rl_reset('no key', '$WINDOW')"
	"ban|-|1|rl_ban|SELECT rl_ban('banned', 3600)"
	"inspect|-|1|rl_inspect|SELECT FROM rl_inspect('a throttle')"
	"masters|-|1|rl_bans, first script|SELECT FROM rl_bans()"
	"bans|-|2|rl_bans, second script|SELECT FROM rl_bans()"
	"version|-|1|rl_status|SELECT FROM rl_status()"
)

# record_script NUMBER SQL: prints the words of this EVALSHA of the SQL.  The first run makes the scripts known.
record_script() {
	# A refused call must reach Redis.
	local pid session=(-c 'SET ratelimit.denial_cache = off' -c "${2//PERIOD/$log_period}")
	sql -o /dev/null "${session[@]}"
	"${AS[@]}" "$REDIS_CLI" -s "$REDIS_SOCKET" MONITOR >"$T/monitor" &
	pid=$!
	await 10 heard '^OK' || die 'Redis does not answer MONITOR'
	sql -o /dev/null "${session[@]}"
	redis ECHO recorded >/dev/null
	await 10 heard '"recorded"' || die 'MONITOR ends too soon'
	kill "$pid"
	wait "$pid" || true
	sed -nE '/ lua\]/d; s/^[^]]*\] "evalsha" (.*)/"evalsha" \1/Ip' "$T/monitor" | sed -n "$1p" | xargs printf '%s\n'
}

# replay NAME N: sends the call of a script N times.
replay() {
	local -a call
	mapfile -t call <"$T/scripts/$1"
	((${#call[@]} > 2)) || die "the call of $1 was not recorded"
	redis CONFIG RESETSTAT >/dev/null
	run_on "$REDIS_BENCHMARK" -s "$REDIS_SOCKET" -c 1 -n "$2" -q "${call[@]}"
	redis INFO commandstats >"$T/out"
	! grep -q '^cmdstat_evalsha:.*failed_calls=[1-9]' "$T/out" || die "Redis answered $1 with errors"
}

prepare_scripts() {
	local row name number title sql rate
	local -a call
	mkdir -p "$T/scripts"
	log_period=500
	# shellcheck disable=SC2034 # for run_on
	cores=$(taskset -cp $$ | sed 's/.*: //; s/.*[,-]//')
	record_script 1 "SELECT rl_throttle('a throttle', 1000000000, 1000, 1)" >"$T/scripts/throttle"
	replay throttle 5000
	mapfile -t call <"$T/scripts/throttle"
	run_on "$REDIS_BENCHMARK" -s "$REDIS_SOCKET" -c 1 -n 20000 -q "${call[@]}"
	rate=$(tr '\r' '\n' <"$T/out" | sed -nE 's/.* ([0-9.]+) requests per second.*/\1/p' | tail -n 1)
	log_period=$(awk -v r="$rate" 'BEGIN { printf "%.0f", 10 * 1e6 / r }')
	for row in "${script_rows[@]}"; do
		IFS='|' read -r name _ number title sql <<<"$row"
		record_script "$number" "$sql" >"$T/scripts/$name"
	done
	# The former script has the time first, empty, and both numbers of nanoseconds.
	mapfile -t call <"$T/scripts/before"
	call[1]=$(redis --raw SCRIPT LOAD "$(<"$SRC/test/bench/throttle_before.lua")")
	printf '%s\n' "${call[@]:0:4}" '' "${call[4]}" "${call[5]}" 0 "${call[6]}" 0 >"$T/scripts/before"
}

# Measures one round of all scripts, with everything on one core.
measure_scripts() {
	local row name
	for row in "${script_rows[@]}"; do
		name=${row%%|*}
		replay "$name" "$((seconds * 10000))"
		sed -nE 's/^cmdstat_evalsha:.*usec_per_call=([0-9.]+).*/\1/p' "$T/out" >>"$T/results/script.$name"
	done
}

replicates() { redis INFO replication | grep -q '^repl_backlog_active:1'; }

report_scripts() {
	local row name target title base us bytes before pid
	# A server counts the bytes for replicas from the first replica on.
	"${AS[@]}" "$REDIS_CLI" -s "$REDIS_SOCKET" --replica >/dev/null 2>&1 &
	pid=$!
	await 10 replicates || die 'Redis has no backlog for replicas'
	kill "$pid"
	wait "$pid" || true
	base=$(median "$T/results/script.before")
	printf '| %-46s | %9s | %9s | %8s | %-6s | %10s |\n' 'one call of a script' us 'x before' target '' replicated
	printf '|:%s-|%s:|%s:|%s:|:%s-|%s:|\n' ---------------------------------------------- ---------- ---------- --------- ------ -----------
	for row in "${script_rows[@]}"; do
		IFS='|' read -r name target _ title _ <<<"$row"
		us=$(median "$T/results/script.$name")
		before=$(memory_field master_repl_offset replication)
		replay "$name" 2000
		bytes=$(($(memory_field master_repl_offset replication) - before))
		awk -v n="$title" -v us="$us" -v base="$base" -v target="$target" -v bytes="$bytes" 'BEGIN {
			printf "| %-46s | %9.1f | %9.2f | %8s | %-6s | %10.0f |\n", n, us, us / base, target == "-" ? "" : "<= " target,
				target == "-" ? "" : us / base <= target ? "met" : "missed", bytes / 2000 }'
	done
	echo
	echo 'us: INFO commandstats, usec_per_call of EVALSHA. replicated: bytes for each replica and the AOF.'
	echo
}
