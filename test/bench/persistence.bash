# shellcheck shell=bash disable=SC2034,SC2154 # round, rounds, seconds, T and others are script/bench's
#
# For script/bench: what ratelimit.local_persistence costs.  In each round, the server runs once
# in each mode, in another order, and each figure is compared with that without persistence in
# the same round.  First of all, a run touches the memory's pages, as a pool's connections do once.
#
# Then percentiles at a fixed rate, beside a loop of COPY and CHECKPOINT.  At last, the time of a recovery.

persistences=(off disk tmpfs)
declare -A PERSISTENCE=([off]='off' [disk]="on, the data directory's file system" [tmpfs]='on, pg_stat_tmp is a tmpfs')
PERSISTENT_LIMITS='1000000000/1d'
PERSISTENT_RATE=2000
persistent_algorithms=(token_bucket fixed_window sliding_window sliding_log)
# A row: name, script, clients.
persistent_loads=(hot:1 hot:2 hot:8 hot:50 many:1 many:2 many:8 many:50)
persistent_recoveries=(100000 1000000)
persistent_figures=("${persistent_loads[@]}" "${persistent_algorithms[@]}" insert million)
declare -A PERSISTENT_TITLE=(
	[hot]='throttle, a hot key' [many]='throttle, 100,000 keys' [insert]='INSERT with a trigger, 8 clients, 100,000 keys' [million]='a million calls in one statement'
)

prepare_persistence() {
	local name
	sql -c 'CREATE UNLOGGED TABLE persistent_orders (customer int)' \
		-c "CREATE TRIGGER limit_orders BEFORE INSERT ON persistent_orders FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '$PERSISTENT_LIMITS')" \
		-c 'CREATE TABLE persistent_load (id int, text text)'
	echo "SELECT rl_allow('hot', '$PERSISTENT_LIMITS');" >"$T/persistent_hot.sql"
	printf '%s\n' '\set i random(1, 100000)' "SELECT rl_allow('many:' || :i, '$PERSISTENT_LIMITS');" >"$T/persistent_many.sql"
	printf '%s\n' '\set i random(1, 100000)' 'INSERT INTO persistent_orders VALUES (:i);' >"$T/persistent_insert.sql"
	for name in "${persistent_algorithms[@]}"; do
		echo "SELECT rl_allow('hot', '$name 5000/50ms');" >"$T/persistent_$name.sql"
	done
}

# persist MODE: starts the server again with it.
persist() {
	local setting=on
	stop_postgres
	rm -rf "$T/data/pg_stat_tmp" "/dev/shm/$(basename "$T")"
	if [[ $1 == tmpfs ]]; then
		run mkdir -m 700 "/dev/shm/$(basename "$T")"
		run ln -s "/dev/shm/$(basename "$T")" "$T/data/pg_stat_tmp"
	else
		run mkdir -m 700 "$T/data/pg_stat_tmp"
	fi
	[[ $1 != off ]] || setting=off
	start_postgres ratelimit.store=local ratelimit.local_max_keys=250000 "ratelimit.local_persistence=$setting" max_connections=100
	[[ $(sql -At -c 'SELECT local_persistence FROM rl_status()') == "$setting" ]] || die "persistence is not $setting"
	sql -o /dev/null -c "SELECT count(rl_allow(key || i, '$PERSISTENT_LIMITS')) FROM unnest('{many:,order:}'::text[]) key, generate_series(1, 100000) i"
}

# persistent_rate SCRIPT CLIENTS: prints how many calls a second there are.
persistent_rate() {
	run_on "$BIN/pgbench" -U postgres -n -M prepared -c "$2" -j "$(($2 < 2 ? 1 : 2))" -T "$seconds" -f "$T/persistent_$1.sql"
	sed -nE 's/^tps = ([0-9.]+).*/\1/p' "$T/out"
}

persistent_percentiles() {
	local pid
	while :; do
		sql -o /dev/null -c 'TRUNCATE persistent_load' -c 'COPY persistent_load FROM PROGRAM $$seq 200000 | sed "s/.*/&	some text of a row, so that there is something to write/"$$' -c CHECKPOINT
	done >"$T/persistent_load.log" 2>&1 &
	pid=$!
	run_on "$BIN/pgbench" -U postgres -n -M prepared -l --log-prefix="$T/tmp/latency" -c 8 -j 2 -R "$PERSISTENT_RATE" -T $((seconds * 3)) -f "$T/persistent_many.sql"
	kill "$pid"
	wait "$pid" || true
	# The time of the statement, without that for which a busy machine started it late.
	cat "$T"/tmp/latency.* | awk '{ print $3 - $7 }' | sort -n | awk '
		{ v[NR] = $1 } END { split("50 99 99.9 100", p, " "); for (i = 1; i <= 4; i++) { at = int(NR * p[i] / 100 + 0.999999); printf "%s ", v[at < 1 ? 1 : at] } print "" }'
	rm "$T"/tmp/latency.*
}

measure_persistence() {
	local mode load name
	while read -r mode; do
		persist "$mode"
		for load in many insert; do
			run_on "$BIN/pgbench" -U postgres -n -M prepared -c 8 -j 2 -t 5000 -f "$T/persistent_$load.sql"
		done
		for load in "${persistent_loads[@]}"; do
			persistent_rate "${load%:*}" "${load#*:}" >>"$T/results/persistent.$load.$mode"
		done
		for name in "${persistent_algorithms[@]}"; do
			persistent_rate "$name" 1 >>"$T/results/persistent.$name.$mode"
		done
		persistent_rate insert 8 >>"$T/results/persistent.insert.$mode"
		sql -At -c "SELECT count(rl_allow('hot', '$PERSISTENT_LIMITS')) FROM generate_series(1, 10000)" -c '\timing on' \
			-c "SELECT count(rl_allow('hot', '$PERSISTENT_LIMITS')) FROM generate_series(1, 1000000)" |
			sed -nE 's/^Time: ([0-9.]+) ms.*/\1/p' | tail -n 1 | awk '{ print 1e9 / $1 }' >>"$T/results/persistent.million.$mode"
		persistent_percentiles >>"$T/results/persistent.percentiles.$mode"
	done < <(shuf -e "${persistences[@]}")
	for load in "${persistent_recoveries[@]}"; do persistent_recovery "$load" >>"$T/results/persistent.recovery.$load"; done
}

# persistent_recovery STATES: prints the seconds of a recovery, after all backends were killed.
persistent_recovery() {
	persist disk
	stop_postgres
	start_postgres ratelimit.local_max_keys="$1"
	sql -o /dev/null -c "SELECT count(rl_allow('many:' || i, '$PERSISTENT_LIMITS')) FROM generate_series(1, $1) i"
	run "$BIN/pg_ctl" -D "$T/data" -s -w -m immediate stop
	start_postgres
	sql -At -c 'SELECT local_recovery FROM rl_status()' | sed -nE "s/^$1 states in ([0-9.]+) s, .*/\1/p" | grep .
}

# persistent_ratio NAME MODE: prints the median of the ratios to off in the same round.
persistent_ratio() { paste "$T/results/persistent.$1.$2" "$T/results/persistent.$1.off" | awk '{ print $1 / $2 }' | median; }

report_persistence() {
	local name title mode worst=9 ratio
	printf '| %-48s | %11s | %9s | %9s |\n' 'ratelimit.local_persistence: calls a second' off 'on, disk' 'on, tmpfs'
	printf '|:%s-|%s:|%s:|%s:|\n' ------------------------------------------------ ------------ ---------- ----------
	for name in "${persistent_figures[@]}"; do
		title=${PERSISTENT_TITLE[${name%:*}]:-$name, a hot key, 1 client}
		[[ $name != *:* ]] || title+=", ${name#*:} clients"
		printf '| %-48s | %11.0f | %9s | %9s |\n' "${title/, 1 clients/, 1 client}" "$(median "$T/results/persistent.$name.off")" \
			"x $(printf %.3f "$(persistent_ratio "$name" disk)")" "x $(printf %.3f "$(persistent_ratio "$name" tmpfs)")"
		if [[ $name =~ ^(hot|many):[128]$ ]]; then
			ratio=$(persistent_ratio "$name" disk)
			worst=$(awk -v a="$worst" -v b="$ratio" 'BEGIN { print a < b ? a : b }')
		fi
	done
	printf '\n| %-48s | %9s | %9s | %9s | %9s |\n' "$PERSISTENT_RATE calls a second beside COPY and CHECKPOINT, us" p50 p99 p99.9 max
	printf '|:%s-|%s:|%s:|%s:|%s:|\n' ------------------------------------------------ ---------- ---------- ---------- ----------
	for mode in "${persistences[@]}"; do
		printf '| %-48s |' "${PERSISTENCE[$mode]}"
		for name in 1 2 3 4; do
			printf ' %9.0f |' "$(awk -v n="$name" '{ print $n }' "$T/results/persistent.percentiles.$mode" | median)"
		done
		echo
	done
	echo
	for name in "${persistent_recoveries[@]}"; do
		echo "Recovery of $name states: $(median "$T/results/persistent.recovery.$name") s (sorted: $(sort -g "$T/results/persistent.recovery.$name" | paste -sd ' '))."
	done
	echo "On, with 1, 2 and 8 clients, a hot key and 100,000 keys: at least x $(printf %.3f "$worst"); the default may be on from x 0.900," \
		"if p99.9 is at most 1,000 us above off: $(paste "$T/results/persistent.percentiles.disk" "$T/results/persistent.percentiles.off" |
			awk '{ print $3 - $7 }' | median) us (medians of $rounds rounds)."
	echo
}
