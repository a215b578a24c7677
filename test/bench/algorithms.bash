# shellcheck shell=bash disable=SC2154 # rounds, seconds, SRC, T and BIN are script/bench's
#
# For script/bench: a row for each algorithm, and rl_simulate.  All calls are allowed.

algorithms=(throttle token_bucket fixed_window sliding_window sliding_log several)
declare -A CALL=(
	[throttle]="rl_throttle('a throttle', 1000000000, 1000, 1)"
	[token_bucket]="rl_token_bucket('a bucket', 1000000000, 1000, 1)"
	[fixed_window]="rl_fixed_window('a window', 1000000000, 60)"
	[sliding_window]="rl_sliding_window('a sliding window', 1000000000, 6, 0.1)"
	[sliding_log]="rl_sliding_log('a log', 100000, 1)"
	[several]="rl_check('several', 'sliding_log 100000/1s, fixed_window 1000000/1min, 1000000/1s')"
)
simulations=(count throttle sliding_log)
declare -A SIMULATION=(
	[count]='count(*)'
	[throttle]="rl_simulate('5/10s', at)"
	[sliding_log]="rl_simulate('sliding_log 5/10s, sliding_log 1000/1d', at)"
)

declare -A SIMULATED=(
	[count]='count(*) OVER'
	[throttle]='rl_simulate OVER, a throttle'
	[sliding_log]='rl_simulate OVER, two sliding logs'
)

# Measures one round of all rows, with everything on one core.
measure_algorithms() {
	local name rate
	for name in "${algorithms[@]}"; do
		echo "SELECT * FROM ${CALL[$name]};" | "${AS[@]}" tee "$T/call.sql" >/dev/null
		redis CONFIG RESETSTAT >/dev/null
		run_on "$BIN/pgbench" -U postgres -n -M prepared -T "$seconds" -f "$T/call.sql"
		rate=$(sed -nE 's/^tps = ([0-9.]+).*/\1/p' "$T/out")
		awk -v r="$rate" 'BEGIN { printf "%.3f\n", 1e6 / r }' >>"$T/results/algorithm.$name"
		redis INFO commandstats | sed -nE 's/^cmdstat_evalsha:.*usec_per_call=([0-9.]+).*/\1/p' \
			>>"$T/results/algorithm.$name.server"
	done
	for name in "${simulations[@]}"; do
		sql -At -c "EXPLAIN (ANALYZE, TIMING OFF)
				SELECT ${SIMULATION[$name]} OVER (PARTITION BY customer ORDER BY at) FROM bench_past" |
			sed -nE 's/^Execution Time: ([0-9.]+) ms/\1/p' >>"$T/results/simulation.$name"
	done
}

prepare_algorithms() {
	sql <<-'END'
		CREATE TABLE bench_past AS
			SELECT i % 1000 AS customer, timestamptz '2024-01-01' + i * interval '10 ms' AS at
			FROM generate_series(1, 1000000) i ORDER BY hashint4(i);
		VACUUM ANALYZE bench_past;
		ALTER SYSTEM SET work_mem = '256MB';
		ALTER SYSTEM SET max_parallel_workers_per_gather = 0;
		ALTER SYSTEM SET jit = off;
		SELECT pg_reload_conf() \g /dev/null
	END
}

report_algorithms() {
	local name base
	printf '| %-46s | %9s | %10s |\n' '1 client, everything on one core, one key' us 'in Redis'
	printf '|:%s-|%s:|%s:|\n' ---------------------------------------------- ---------- -----------
	for name in "${algorithms[@]}"; do
		printf '| %-46s | %9.1f | %10.1f |\n' "${CALL[$name]%%(*}$([[ $name != several ]] || echo ', three limits together')" \
			"$(median "$T/results/algorithm.$name")" "$(median "$T/results/algorithm.$name.server")"
	done
	echo
	base=$(median "$T/results/simulation.count")
	printf '| %-46s | %9s | %10s | %10s |\n' '1,000,000 rows, 1,000 partitions' ms 'x count(*)' 'rows/s'
	printf '|:%s-|%s:|%s:|%s:|\n' ---------------------------------------------- ---------- ----------- -----------
	for name in "${simulations[@]}"; do
		awk -v n="${SIMULATED[$name]}" -v ms="$(median "$T/results/simulation.$name")" -v b="$base" \
			'BEGIN { printf "| %-46s | %9.0f | %10.2f | %10.0f |\n", n, ms, ms / b, 1e9 / ms }'
	done
	echo
}
