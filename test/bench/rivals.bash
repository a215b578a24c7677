# shellcheck shell=bash disable=SC2153,SC2154 # rounds, seconds, T and others are script/bench's
#
# For script/bench: ways to limit an INSERT INTO orders.  First their speed under a limit that
# refuses nothing, with 1,000 customers.  Then how many orders of one customer are inserted
# above a limit of 100 a day: after 8 clients have tried 50 times each; and after a process was
# killed in such a race, when half of the limit was used, and 8 clients have raced again.  The
# process is node, or the backend of a client of pgbench, so that PostgreSQL starts again.
#
# The local store keeps its counts (ratelimit.local_persistence).
#
# tbf_rate_check has only limits a second, with a burst of two seconds.  So it has 50 a second,
# and may insert 50 more for each second between the first order and the last.

RIVAL_LIMIT=100 RIVAL_NO_LIMIT=1000000000
rival_clients=(1 8 50)
# A row: name, client, schema, statement of pgbench or limiter of node, store, title.
rivals=(
	'insert|pgbench|plain|insert|redis|INSERT alone'
	'counter|pgbench|plain|counter|redis|counter table, INSERT ... ON CONFLICT'
	'locking|pgbench|locking|insert|redis|trigger in PL/pgSQL, SELECT FOR UPDATE'
	'tbf|pgbench|plain|tbf|redis|tbf_rate_check of yeti-pg-ext'
	'enforce|pgbench|enforced|insert|redis|trigger rl_enforce, Redis'
	'local|pgbench|enforced|insert|local|trigger rl_enforce, local store, kept'
	'node_insert|node|plain|none|redis|node: INSERT alone'
	'node_redis|node|plain|redis|redis|node: rate-limiter-flexible, Redis'
	'node_postgres|node|plain|postgres|redis|node: rate-limiter-flexible, PostgreSQL'
	'node_enforce|node|enforced|none|redis|node: trigger rl_enforce, Redis'
)
declare -A rival_statement=(
	[insert]='INSERT INTO orders (customer) VALUES (:customer)'
	[try]='SELECT try_order(:customer)'
	[counter]='WITH counted AS (
			INSERT INTO order_counts AS c VALUES (:customer::int, current_date, 1)
			ON CONFLICT (customer, day) DO UPDATE SET n = c.n + 1 WHERE c.n < :limit RETURNING 1)
		INSERT INTO orders (customer) SELECT :customer::int FROM counted'
	[tbf]='INSERT INTO orders (customer) SELECT :customer::int WHERE tbf_rate_check(1, :customer::int, :limit::int / 2)'
)
# Why rows have no figures.
declare -A rival_without=()
rival_customer=1000 rival_versions='no packages'

# Builds yeti-pg-ext, which PostgreSQL must preload.
build_tbf() {
	rival_without[tbf]='not built: no --tbf'
	[[ -n $tbf ]] || return 0
	"${AS[@]}" mkdir "$T/tbf"
	tar -C "$tbf" --exclude=.git -cf - . | "${AS[@]}" tar -C "$T/tbf" -xf - --no-same-owner
	rival_without[tbf]='not built: make failed'
	run make -C "$T/tbf" PG_CONFIG="$PG_CONFIG" all install >"$T/tbf.log" 2>&1 || { tail "$T/tbf.log"; return 0; }
	unset 'rival_without[tbf]'
	preload+=,yeti_pg_ext
}

prepare_rivals() {
	local packages=(pg@8 ioredis@5 rate-limiter-flexible@11) name
	sql -v limit=$RIVAL_LIMIT -v no_limit=$RIVAL_NO_LIMIT -f "$SRC/test/bench/rivals.sql"
	[[ -n ${rival_without[tbf]:-} ]] || sql -c 'CREATE EXTENSION yeti'
	if npm install --ignore-scripts --no-audit --no-fund --prefix "$T/npm" "${packages[@]}" >"$T/npm.log" 2>&1; then
		# many.bash has a function "node".
		rival_versions=$(command node --version)
		for name in "${packages[@]%@*}"; do
			rival_versions+=", $name $(sed -nE 's/^ *"version": "(.*)".*/\1/p' "$T/npm/node_modules/$name/package.json")"
		done
	else
		tail "$T/npm.log"
		for name in node_{insert,redis,postgres,enforce}; do rival_without[$name]='npm installed no packages'; done
	fi
}

# rival_command CLIENTS [TRIES PAUSE]: sets "command" to clients that insert orders without
# refusals for "seconds"; or that try to insert so many of rival_customer, with pauses in ms.
rival_command() {
	local tries=${2:-0} pause=${3:-0} what=$statement first=1 last=1000 limit=$RIVAL_NO_LIMIT
	((tries == 0)) || first=$rival_customer last=$rival_customer limit=$RIVAL_LIMIT
	command=(env "PGOPTIONS=-c search_path=$schema,public -c ratelimit.store=$store")
	if [[ $client == node ]]; then
		command+=("NODE_PATH=$T/npm/node_modules" node "$SRC/test/bench/rivals.js" "limiter=$statement" "redis=$REDIS_SOCKET" "clients=$1"
			"limit=$limit" "first=$first" "last=$last" "tries=$tries" "pause=$pause" "seconds=$seconds" "log=$T/tmp/rival.log")
		return
	fi
	((tries == 0)) || [[ $what != insert ]] || what=try
	printf '%s\n' '\set customer random(:first, :last)' "${rival_statement[$what]};" >"$T/rival.sql"
	((pause == 0)) || echo "\\sleep $pause ms" >>"$T/rival.sql"
	command+=("$BIN/pgbench" -n -M prepared -c "$1" -j "$(($1 < $(nproc) ? $1 : $(nproc)))" -D "limit=$limit" -D "first=$first" -D "last=$last" -f "$T/rival.sql")
	if ((tries)); then command+=(-t "$tries"); else command+=(-T "$seconds" -l --log-prefix="$T/tmp/rival"); fi
}

# Prints the orders of the customer, and how many of them are above the limit, which is
# negative if they are fewer.
count_orders() {
	local refill=0
	[[ $statement != tbf ]] || refill=$((RIVAL_LIMIT / 2))
	sql -At -F ' ' -c "SELECT count(*), count(*) - floor($RIVAL_LIMIT + $refill * extract(epoch FROM max(at) - min(at)))
		FROM $schema.orders WHERE customer = $rival_customer"
}
half_used() { local n _; read -r n _ < <(count_orders) && ((n >= RIVAL_LIMIT / 2)); }
answers() { [[ $(sql -At -c 'SELECT 1' 2>/dev/null) == 1 ]]; }

race() {
	rival_command 8 50 0
	run_on "${command[@]}"
}

race_killed() {
	local victim
	rival_command 8 50 100
	start "${AS[@]}" "${command[@]}" >"$T/out" 2>&1
	await 30 half_used || { cat "$T/out"; die "$title: no race"; }
	victim=$CHILD
	[[ $client == node ]] || victim=$(sql -At -c "SELECT pid FROM pg_stat_activity WHERE application_name = 'pgbench' LIMIT 1")
	kill -KILL "$victim"
	! finish 2>/dev/null || die "$title: the race had ended before the kill"
	await 60 answers || die 'PostgreSQL does not start again'
	race
}

measure_rivals() {
	local row name client schema statement store title clients how command n excess
	for clients in "${rival_clients[@]}"; do
		for row in "${rivals[@]}"; do
			IFS='|' read -r name client schema statement store title <<<"$row"
			[[ -z ${rival_without[$name]:-} ]] || continue
			sql -c "TRUNCATE $schema.orders"
			rival_command "$clients"
			run_on "${command[@]}"
			{ sed -nE 's/^tps = ([0-9.]+).*/\1/p' "$T/out"; percentiles_of_log "$T"/tmp/rival.*; } | paste -s >>"$T/results/rivals.$name.$clients"
			rm "$T"/tmp/rival.*
		done
	done
	for how in race race_killed; do
		for row in "${rivals[@]}"; do
			IFS='|' read -r name client schema statement store title <<<"$row"
			[[ -z ${rival_without[$name]:-} ]] || continue
			((++rival_customer))
			$how
			read -r n excess < <(count_orders)
			((n > 0)) || die "$title: no orders"
			echo "$excess" >>"$T/results/rivals.$name.$how"
		done
	done
}

report_rivals() {
	local row name title clients i
	printf '| %-40s ' 'orders a second; ms; above the limit'
	printf '| %7s | %6s | %6s ' '1 cl.' p50 p99 '8 cl.' p50 p99 '50 cl.' p50 p99
	printf '| %5s | %6s |\n|:%s-' race killed ----------------------------------------
	printf '%s' '|--------:|-------:|-------:'{,,}
	printf '|------:|-------:|\n'
	for row in "${rivals[@]}"; do
		IFS='|' read -r name _ _ _ _ title <<<"$row"
		printf '| %-40s ' "$title"
		if [[ -n ${rival_without[$name]:-} ]]; then
			printf '| %s |\n' "${rival_without[$name]}"
			continue
		fi
		for clients in "${rival_clients[@]}"; do
			for i in 1 2 3; do reserve_median "rivals.$name.$clients" "\$$i"; done | paste -s |
				awk '{ printf "| %7.0f | %6.2f | %6.2f ", $1, $2 / 1000, $3 / 1000 }'
		done
		printf '| %5.0f | %6.0f |\n' "$(median "$T/results/rivals.$name.race")" "$(median "$T/results/rivals.$name.race_killed")"
	done
	echo
	echo "Times with 1,000 customers and no refusal. Race: 8 clients try 50 times each, with a limit of $RIVAL_LIMIT a day for one customer."
	echo "Killed: a backend, or node, in such a race; then the clients race again. A negative number: fewer orders than the limit."
	echo "node: $rival_versions."
	echo
}
