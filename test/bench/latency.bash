# shellcheck shell=bash disable=SC2154 # seconds, T, SRC and others are script/bench's
#
# For script/bench: percentiles of the time of a call with 1, 8 and 50 clients, from
# pgbench's log of each transaction and from the summary of redis-benchmark.

latencies=(select_1 throttle_field gcra_one gcra_script)
latency_clients=(1 8 50)
percentiles=(50 99 99.9)

# percentiles_of_log FILE...: prints the percentiles of pgbench's logs in microseconds.
percentiles_of_log() {
	cat "$@" | awk '{ print $3 }' | sort -n | awk -v of="${percentiles[*]}" '
		{ v[NR] = $1 }
		END { n = split(of, p, " "); for (i = 1; i <= n; i++) { at = int(NR * p[i] / 100 + 0.999999); print v[at < 1 ? 1 : at] } }'
}

# percentiles_of_benchmark FILE: the same of redis-benchmark, which prints the percentile
# 99.902 in place of 99.9.
percentiles_of_benchmark() {
	tr '\r' '\n' <"$1" | awk '
		/latency summary/ { getline; getline; print $3 * 1000; print $5 * 1000 }
		$1 == "99.902%" { p = $3 * 1000 } $1 == "100.000%" && p == "" { p = $3 * 1000 }
		END { print p }'
}

# Measures one round.
measure_latency() {
	local name clients p
	for clients in "${latency_clients[@]}"; do
		for name in "${latencies[@]}"; do
			if [[ $name == gcra_script ]]; then
				run_on "$REDIS_BENCHMARK" -s "$REDIS_SOCKET" -c "$clients" -n $((seconds * 30000)) --precision 3 "${gcra[@]}"
				percentiles_of_benchmark "$T/out"
			else
				run_on "$BIN/pgbench" -U postgres -n -M prepared -l --log-prefix="$T/tmp/latency" -c "$clients" \
					-j "$((clients < $(nproc) ? clients : $(nproc)))" -T "$seconds" -f "$SRC/test/bench/${FILE[$name]}.sql"
				percentiles_of_log "$T"/tmp/latency.*
				rm "$T"/tmp/latency.*
			fi >"$T/percentiles"
			for p in "${percentiles[@]}"; do
				read -r us && echo "$us" >>"$T/results/latency.$name.$clients.$p"
			done <"$T/percentiles" || die "$name has no percentiles"
		done
	done
}

report_latency() {
	local name clients p
	printf '| %-46s | %7s | %9s | %9s | %9s |\n' 'latency in us' clients p50 p99 p99.9
	printf '|:%s-|%s:|%s:|%s:|%s:|\n' ---------------------------------------------- -------- ---------- ---------- ----------
	for clients in "${latency_clients[@]}"; do
		for name in "${latencies[@]}"; do
			printf '| %-46s | %7s |' "${ROW[$name]}" "$clients"
			for p in "${percentiles[@]}"; do
				printf ' %9.0f |' "$(median "$T/results/latency.$name.$clients.$p")"
			done
			echo
		done
	done
	echo
}
