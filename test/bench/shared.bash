# shellcheck shell=bash disable=SC2154 # cores, round, T and results are script/bench's
#
# For script/bench: a million calls in one query that shared memory decides,
# compared with a C function that takes the same keys, returns the same row and
# does nothing else.

ONE="'one', 1000000000, 1000, 1"
MANY="'many:' || i, 1000000000, 1000, 1"
REFUSED="'refused', 1, 1, 31536000"

# The rows after a floor are compared with it.
millions=(floor hot refused cached floor_many new known)
declare -A MILLION=(
	[floor]='C function that does nothing'
	[hot]='local store, one key, allowed'
	[refused]='local store, one key, refused'
	[cached]='denial cache, one key, refused'
	[floor_many]='C function that does nothing, 1,000,000 keys'
	[new]='local store, 1,000,000 keys, new'
	[known]='local store, 1,000,000 keys, known'
)
declare -A MILLION_CALL=(
	[floor]="bench_nothing($ONE)" [hot]="rl_throttle($ONE)" [refused]="rl_throttle($REFUSED)" [cached]="rl_throttle($REFUSED)"
	[floor_many]="bench_nothing($MANY)" [new]="rl_throttle($MANY)" [known]="rl_throttle($MANY)"
)
declare -A MILLION_TARGET=([hot]=2 [refused]=2 [cached]=2 [new]=4 [known]=4)

# Measures one round of all rows.  The figure is the processor time of a query,
# because it depends less on other processes than the elapsed time.
measure_shared() {
	local name store calls
	for name in "${millions[@]}"; do
		if [[ $name == cached ]]; then store=redis; else store=local; fi
		redis CONFIG RESETSTAT >/dev/null
		sql -At -c 'SET jit = off' -c "SET work_mem = '256MB'" -c "SET ratelimit.store = $store" \
			-c "SET ratelimit.key_prefix = 'round$round:'" -c "SELECT FROM rl_throttle($REFUSED)" \
			-c 'SET client_min_messages = log' -c 'SET log_executor_stats = on' \
			-c "SELECT count(${MILLION_CALL[$name]}) FROM generate_series(1, 1000000) i" 2>&1 |
			sed -nE 's/^!\s+([0-9.]+) s user, ([0-9.]+) s system, [0-9.]+ s elapsed$/\1 \2/p' |
			awk '{ print ($1 + $2) * 1000 }' >>"$T/results/million.$name"
		calls=$(redis INFO commandstats | sed -nE 's/^cmdstat_evalsha:calls=([0-9]+).*/\1/p')
		((${calls:-0} <= 20)) || die "Redis was asked $calls times, so shared memory did not decide: ${MILLION[$name]}"
	done
	[[ $(sql -At -c "SET ratelimit.store = local" -c "SET ratelimit.key_prefix = 'round$round:'" -c "SELECT (rl_throttle($ONE, 0)).allowed, (rl_throttle($REFUSED)).allowed") == 't|f' ]] ||
		die 'the decisions of the local store are wrong'
}

# shared_line TITLE FIGURE RATIO TARGET: prints a row.  A target that begins with > is a minimum.
shared_line() {
	awk -v n="$1" -v figure="$2" -v ratio="$3" -v target="$4" 'BEGIN {
		least = sub(/^>/, "", target)
		verdict = target == "" ? "" : (least ? ratio >= target : ratio <= target) ? "met" : "missed"
		printf "| %-46s | %9.0f | %6.2f | %8s | %-6s |\n", n, figure, ratio,
			target == "" ? "" : (least ? ">= " : "<= ") target, verdict }'
}

# shared_head TITLE UNIT: prints the head of a table.
shared_head() {
	printf '| %-46s | %9s | %6s | %8s | %-6s |\n' "$1" "$2" ratio target ''
	printf '|:%s-|%s:|%s:|%s:|:%s-|\n' ---------------------------------------------- ---------- ------- --------- ------
}

# rate ROW: prints the transactions per second of 8 clients.
rate() { awk -v us="$(median "$T/results/eight.$1")" 'BEGIN { print 8e6 / us }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { print a / b }'; }

report_shared() {
	local name ms base local_rate
	shared_head '1,000,000 calls in one query, processor time' ms
	for name in "${millions[@]}"; do
		ms=$(median "$T/results/million.$name")
		[[ $name != floor* ]] || base=$ms
		shared_line "${MILLION[$name]}" "$ms" "$(ratio "$ms" "$base")" "${MILLION_TARGET[$name]:-}"
	done
	echo
	echo 'A ratio is to the C function above the row. The store has room for all new keys.'
	echo
	local_rate=$(rate throttle_local)
	shared_head '8 clients, one key: rates' 'per s'
	shared_line "${ROW[throttle_local]}" "$local_rate" 1 ''
	shared_line "${ROW[nothing]}" "$(rate nothing)" "$(ratio "$local_rate" "$(rate nothing)")" '>0.9'
	shared_line "${ROW[gcra_one]}" "$(rate gcra_one)" "$(ratio "$local_rate" "$(rate gcra_one)")" '>2.2'
	echo
	echo "A ratio is the rate of the local store divided by the rate of the row."
	echo
}
