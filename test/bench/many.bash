# shellcheck shell=bash disable=SC2153,SC2154 # words, cores, round, T and others are script/bench's
#
# For script/bench: calls for many keys together.  rl_check_many, and a trigger FOR EACH
# STATEMENT on a row for each key, are compared with redis-benchmark, which runs the
# throttle's script in a pipeline of 16; a cluster with one server; and a trigger FOR
# EACH STATEMENT with a trigger FOR EACH ROW.

CHECKED=10000
pipelines=(check_many clients_1 clients_50)
declare -A PIPELINE=(
	[check_many]='rl_check_many'
	[keys_added]='trigger FOR EACH STATEMENT, a row for each key'
	[clients_1]='redis-benchmark -P 16 -c 1'
	[clients_50]='redis-benchmark -P 16 (50 clients)'
)
PIPELINE_TARGET=0.6
wheres=(tcp cluster)
declare -A WHERE=(
	[tcp]='rl_check_many, TCP'
	[cluster]='rl_check_many, cluster of three masters'
)
CLUSTER_TARGET=2
triggers=(none row statement)
declare -A TRIGGER=(
	[none]='no trigger'
	[row]='trigger FOR EACH ROW'
	[statement]='trigger FOR EACH STATEMENT'
)
TRIGGER_TARGET=0.1

node() { "${AS[@]}" "$REDIS_CLI" -p "$@"; }
node_answers() { [[ $(node "$1" PING 2>/dev/null) == PONG ]]; }
node_is_well() { [[ $(node "$1" CLUSTER INFO) == *cluster_state:ok*cluster_known_nodes:3* ]]; }

# Starts a cluster, and sets "seeds" to its URL.
start_cluster() {
	local i port bus ports=() buses=()
	for i in 0 1 2; do
		port=$(free_port) bus=$(free_port)
		"${AS[@]}" mkdir "$T/redis/$i"
		run "$REDIS_SERVER" --bind 127.0.0.1 --port "$port" --cluster-enabled yes --cluster-port "$bus" \
			--dir "$T/redis/$i" --logfile log --save '' --appendonly no --daemonize yes >"$T/out"
		await 10 node_answers "$port" || die "$REDIS_SERVER does not start as a cluster's node"
		node "$port" CLUSTER SET-CONFIG-EPOCH $((i + 1)) >"$T/out"
		node "$port" CLUSTER ADDSLOTSRANGE $((16384 * i / 3)) $((16384 * (i + 1) / 3 - 1)) >"$T/out"
		ports+=("$port") buses+=("$bus")
	done
	for i in 1 2; do
		node "${ports[0]}" CLUSTER MEET 127.0.0.1 "${ports[i]}" "${buses[i]}" >"$T/out"
	done
	for port in "${ports[@]}"; do
		await 30 node_is_well "$port" || die 'the cluster does not start'
	done
	seeds=redis://127.0.0.1:${ports[0]},127.0.0.1:${ports[1]},127.0.0.1:${ports[2]}
}

prepare_many() {
	local seeds
	start_cluster
	sql -c 'CREATE ROLE cluster SUPERUSER LOGIN' -c "ALTER ROLE cluster SET ratelimit.redis_url = '$seeds'"
	sql <<-END
		CREATE UNLOGGED TABLE bench_keys AS SELECT array_agg('many:' || i) AS keys FROM generate_series(1, $CHECKED) i;
		CREATE UNLOGGED TABLE bench_none (customer int, at timestamptz);
		CREATE UNLOGGED TABLE bench_row (LIKE bench_none);
		CREATE UNLOGGED TABLE bench_statement (LIKE bench_none);
		CREATE TRIGGER row AFTER INSERT ON bench_row FOR EACH ROW
			EXECUTE FUNCTION rl_enforce('order:{customer}', '1000/1s burst 1000000000');
		CREATE TRIGGER statement AFTER INSERT ON bench_statement REFERENCING NEW TABLE AS added FOR EACH STATEMENT
			EXECUTE FUNCTION rl_enforce('order:{customer}', '1000/1s burst 1000000000');
	END
}

# execution_time SQL [ROLE]: prints the milliseconds of the third execution.
execution_time() {
	for _ in 1 2 3; do printf 'EXPLAIN (ANALYZE, TIMING OFF) %s;\n' "$1"; done |
		sql -At -U "${2:-$PGUSER}" | sed -nE 's/^Execution Time: ([0-9.]+) ms/\1/p' | tail -n 1
}

# measure_many MODE: appends the microseconds per key, and the milliseconds per statement, to the results.
measure_many() {
	local name rate call=("${words[@]/rl:\{one\}/rl:\{bench:__rand_int__\}}")
	[[ ${call[*]} == *__rand_int__* ]] || die 'the recorded call has no key to vary'
	for name in "${pipelines[@]}" "${wheres[@]}"; do
		if [[ $name != clients_* ]]; then
			execution_time "SELECT count(*) FROM bench_keys, rl_check_many(keys, '1000/1s burst 1000000000')" \
				"$([[ $name == check_many ]] || echo "$name")" | awk -v n="$CHECKED" '{ print $1 * 1000 / n }' >>"$T/results/$1.$name"
			continue
		fi
		# The first run makes the keys, because those of rl_check_many exist already.
		for _ in 1 2; do
			run_on "$REDIS_BENCHMARK" -s "$REDIS_SOCKET" -P 16 -c "${name#clients_}" -n "$CHECKED" -r "$CHECKED" -q "${call[@]}"
		done
		rate=$(tr '\r' '\n' <"$T/out" | sed -nE 's/.* ([0-9.]+) requests per second.*/\1/p' | tail -n 1)
		awk -v r="$rate" 'BEGIN { print 1e6 / r }' >>"$T/results/$1.$name"
	done
	for name in none statement; do
		sql -c "TRUNCATE bench_$name"
		execution_time "INSERT INTO bench_$name SELECT i, now() FROM generate_series(1, $CHECKED) i" |
			awk -v n="$CHECKED" '{ print $1 * 1000 / n }' >>"$T/results/$1.keys_$name"
	done
	paste "$T/results/$1.keys_"{none,statement} | awk '{ print $2 - $1 }' >"$T/results/$1.keys_added"
	for name in "${triggers[@]}"; do
		sql -c "TRUNCATE bench_$name"
		execution_time "INSERT INTO bench_$name SELECT i % 100, now() FROM generate_series(1, 10000) i" >>"$T/results/$1.trigger_$name"
	done
}

# many_line TITLE FIGURE RATIO TARGET: prints a row.
many_line() {
	awk -v n="$1" -v figure="$2" -v ratio="$3" -v target="$4" 'BEGIN {
		printf "| %-46s | %9.2f | %6s | %8s | %-6s |\n", n, figure, ratio == "" ? "" : sprintf("%.2f", ratio),
			target == "" ? "" : "<= " target, target == "" ? "" : ratio <= target ? "met" : "missed" }'
}

many_head() {
	printf '| %-46s | %9s | %6s | %8s | %-6s |\n' "$1" "$2" ratio target ''
	printf '|:%s-|%s:|%s:|%s:|:%s-|\n' ---------------------------------------------- ---------- ------- --------- ------
}

# Prints the tables.  A ratio is the median of the ratios of the rounds.
report_many() {
	local mode name
	for mode in "${modes[@]}"; do
		[[ -s $T/results/$mode.check_many ]] || continue
		many_head "$CHECKED keys; ${MODE[$mode]}" 'us a key'
		for name in clients_1 clients_50; do
			many_line "${PIPELINE[$name]}" "$(median "$T/results/$mode.$name")" '' ''
		done
		for name in check_many keys_added; do
			many_line "${PIPELINE[$name]}" "$(median "$T/results/$mode.$name")" \
				"$(paste "$T/results/$mode.$name" "$T/results/$mode.clients_1" | awk '{ print $1 / $2 }' | median)" "$PIPELINE_TARGET"
		done
		many_line "${WHERE[tcp]}" "$(median "$T/results/$mode.tcp")" '' ''
		many_line "${WHERE[cluster]}" "$(median "$T/results/$mode.cluster")" \
			"$(paste "$T/results/$mode.cluster" "$T/results/$mode.tcp" | awk '{ print $1 / $2 }' | median)" "$CLUSTER_TARGET"
		echo
		many_head 'the same; INSERT of 10,000 rows with 100 keys' ms
		for name in "${triggers[@]}"; do
			many_line "${TRIGGER[$name]}" "$(median "$T/results/$mode.trigger_$name")" \
				"$([[ $name != statement ]] || paste "$T/results/$mode.trigger_"{none,row,statement} | awk '{ print ($3 - $1) / ($2 - $1) }' | median)" \
				"$([[ $name != statement ]] || echo "$TRIGGER_TARGET")"
		done
		echo
	done
	echo "Ratios: rl_check_many, and the time that the trigger adds, to redis-benchmark -P 16 -c 1; a cluster to one server; the time that the trigger FOR EACH STATEMENT adds to the time that the trigger FOR EACH ROW adds."
	echo
}
