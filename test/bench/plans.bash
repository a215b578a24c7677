# shellcheck shell=bash disable=SC2154 # cores, round, T and results are script/bench's
#
# For script/bench: rows under a trigger whose limits come from a function, compared
# with the sum of the same function called by itself and the same trigger with fixed
# limits, and with one statement that does both for each row.  There are 1,000 plans
# with different limits, and 20,000 rows of as many customers, in random order.
#
# The rows come in three ways: one statement inserts all under a row trigger, one
# statement inserts all under a statement trigger, or a client inserts each row by a
# statement of its own, under a row trigger.  There the function by itself costs what a
# SELECT of it takes more than SELECT 1.  This is measured for a function in PL/pgSQL too:
# before PostgreSQL 18, one in SQL is planned again in each transaction.
#
# A key by a function, which does nothing else, is compared with one statement that calls
# the function for each row under the same trigger with a column as the key.

plan_rows=20000
plans=(function fixed both by_function fixed_statement by_function_statement both_key key_by_function
	single.nothing single.function single.plpgsql single.fixed single.by_function single.by_plpgsql)
declare -A PLAN=(
	[function]='the function called by itself, for each row of a table'
	[fixed]='one INSERT, row trigger with fixed limits'
	[both]='one INSERT that calls the function, row trigger with fixed limits'
	[by_function]='one INSERT, row trigger with limits by the function'
	[fixed_statement]='one INSERT, statement trigger with fixed limits'
	[by_function_statement]='one INSERT, statement trigger with limits by the function'
	[both_key]='one INSERT that calls the function for the key, row trigger with a column'
	[key_by_function]='one INSERT, row trigger with a key by the function'
	[single.nothing]='SELECT 1 by a client'
	[single.function]='SELECT of the function by a client'
	[single.plpgsql]='SELECT of the same function in PL/pgSQL by a client'
	[single.fixed]='an INSERT for each row, row trigger with fixed limits'
	[single.by_function]='an INSERT for each row, row trigger with limits by the function'
	[single.by_plpgsql]='an INSERT for each row, row trigger with limits by PL/pgSQL'
)
PLAN_TARGET=1.15
KEY_TARGET=1.05

prepare_plans() {
	local name query='SELECT limits FROM plans JOIN customers ON plans.id = plan WHERE customers.id = customer'
	sql <<-END
		CREATE TABLE plans (id int PRIMARY KEY, limits rl_limits NOT NULL);
		INSERT INTO plans SELECT i, format('1000000/1h burst %s', 1000000 + i)::rl_limits FROM generate_series(0, 999) i;
		CREATE TABLE customers (id int PRIMARY KEY, plan int NOT NULL);
		INSERT INTO customers SELECT i, i % 1000 FROM generate_series(1, $plan_rows) i;
		CREATE TABLE wanted AS SELECT id AS customer FROM customers ORDER BY random();
		VACUUM ANALYZE plans, customers, wanted;
		CREATE FUNCTION limits_of(customer int) RETURNS rl_limits LANGUAGE sql STABLE SECURITY DEFINER
			SET search_path = public, pg_temp AS
			'$query';
		CREATE UNLOGGED TABLE fixed (customer int);
		CREATE TRIGGER enforce BEFORE INSERT ON fixed
			FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', '1000000/1h');
		CREATE UNLOGGED TABLE by_function (customer int);
		CREATE TRIGGER enforce BEFORE INSERT ON by_function
			FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', 'public.limits_of({customer})');
		CREATE UNLOGGED TABLE fixed_statement (customer int);
		CREATE TRIGGER enforce AFTER INSERT ON fixed_statement REFERENCING NEW TABLE AS new_rows
			FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('order:{customer}', '1000000/1h');
		CREATE UNLOGGED TABLE by_function_statement (customer int);
		CREATE TRIGGER enforce AFTER INSERT ON by_function_statement REFERENCING NEW TABLE AS new_rows
			FOR EACH STATEMENT EXECUTE FUNCTION rl_enforce('order:{customer}', 'public.limits_of({customer})');
		CREATE FUNCTION limits_of_plpgsql(customer int) RETURNS rl_limits LANGUAGE plpgsql STABLE SECURITY DEFINER
			SET search_path = public, pg_temp AS
			'BEGIN RETURN ($query); END';
		CREATE UNLOGGED TABLE by_plpgsql (customer int);
		CREATE TRIGGER enforce BEFORE INSERT ON by_plpgsql
			FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', 'public.limits_of_plpgsql({customer})');
		CREATE FUNCTION key_of(customer int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN customer; END';
		CREATE UNLOGGED TABLE key_by_function (customer int);
		CREATE TRIGGER enforce BEFORE INSERT ON key_by_function
			FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{public.key_of({customer})}', '1000000/1h');
	END
	for name in 'nothing SELECT 1' 'function SELECT limits_of(:customer)' 'fixed INSERT INTO fixed VALUES (:customer)' \
		'by_function INSERT INTO by_function VALUES (:customer)' 'plpgsql SELECT limits_of_plpgsql(:customer)' \
		'by_plpgsql INSERT INTO by_plpgsql VALUES (:customer)'; do
		printf '\\set customer random(1, %d)\n%s;\n' "$plan_rows" "${name#* }" >"$T/single_${name%% *}.sql"
	done
}

# time_plan STORE NAME STATEMENT: appends the microseconds for a row to the results.  The
# second run is timed, because a session reads catalogs and parses each plan in the first.
time_plan() {
	local store=$1 name=$mode.$2 statement=$3
	sql -At -c "SET ratelimit.store = $store" -c "SET ratelimit.key_prefix = 'round$round:'" -c 'SET jit = off' \
		-c "$statement" -c '\timing on' -c "$statement" | sed -nE 's/^Time: ([0-9.]+) ms.*/\1/p' |
		awk -v n="$plan_rows" '{ print $1 * 1000 / n }' >>"$T/results/plan.$store.$name"
}

# time_single STORE NAME: appends the microseconds for a statement of a client.
time_single() {
	local store=$1 name=$2
	run_on env "PGOPTIONS=-c ratelimit.store=$store -c ratelimit.key_prefix=round$round:" \
		"$BIN/pgbench" -n -M prepared -t "$plan_rows" -f "$T/single_$name.sql"
	sed -nE 's/^tps = ([0-9.]+).*/\1/p' "$T/out" | awk '{ print 1e6 / $1 }' >>"$T/results/plan.$store.$mode.single.$name"
}

# Measures one round.  The first call of a new prefix makes all states.
measure_plans() {
	local store name
	for store in redis local; do
		sql -At -o /dev/null -c "SET ratelimit.store = $store" -c "SET ratelimit.key_prefix = 'round$round:'" \
			-c 'INSERT INTO fixed SELECT customer FROM wanted'
		time_plan "$store" function 'SELECT count(limits_of(customer)) FROM wanted'
		for name in fixed by_function fixed_statement by_function_statement; do
			time_plan "$store" "$name" "INSERT INTO $name SELECT customer FROM wanted"
		done
		time_plan "$store" both 'INSERT INTO fixed SELECT customer FROM wanted WHERE limits_of(customer) IS NOT NULL'
		time_plan "$store" key_by_function 'INSERT INTO key_by_function SELECT customer FROM wanted'
		time_plan "$store" both_key 'INSERT INTO fixed SELECT customer FROM wanted WHERE key_of(customer) IS NOT NULL'
		for name in nothing function plpgsql fixed by_function by_plpgsql; do time_single "$store" "$name"; done
		sql -c 'TRUNCATE fixed, by_function, by_plpgsql, fixed_statement, by_function_statement, key_by_function'
	done
	redis FLUSHALL >/dev/null
}

# plan_ratio TITLE TARGET: prints the median of the ratios that it reads.
plan_ratio() {
	sort -g | awk -v title="$1" -v target="$2" 'NR == 1 { least = $1 } { most = $1; v[NR] = $1 } END {
		figure = (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2
		printf "  %s, median of the rounds: %.3f (%.3f to %.3f)", title, figure, least, most
		if (target != "") printf "; target at most %s: %s", target, figure <= target ? "met" : "missed"
		print "" }'
}

report_plans() {
	local mode store name results by='limits by the function / (function + fixed limits)'
	for mode in "${modes[@]}"; do
		[[ $mode != eight ]] || continue
		for store in redis local; do
			results=$T/results/plan.$store.$mode
			echo "${MODE[$mode]}, store $store, $plan_rows rows, 1,000 plans, us for a row:"
			for name in "${plans[@]}"; do
				printf '  %-72s %6.1f\n' "${PLAN[$name]}" "$(median "$results.$name")"
			done
			paste "$results."{by_function,function,fixed} | awk '{ print $1 / ($2 + $3) }' |
				plan_ratio "one INSERT, row trigger: $by" "$PLAN_TARGET"
			paste "$results."{by_function,both} | awk '{ print $1 / $2 }' |
				plan_ratio 'one INSERT, row trigger: limits by the function / both in one statement' ''
			paste "$results."{by_function_statement,function,fixed_statement} | awk '{ print $1 / ($2 + $3) }' |
				plan_ratio "one INSERT, statement trigger: $by" "$PLAN_TARGET"
			paste "$results.single."{by_function,function,nothing,fixed} | awk '{ print $1 / ($2 - $3 + $4) }' |
				plan_ratio "an INSERT for each row, row trigger: $by" "$PLAN_TARGET"
			paste "$results.single."{by_plpgsql,plpgsql,nothing,fixed} | awk '{ print $1 / ($2 - $3 + $4) }' |
				plan_ratio "an INSERT for each row, row trigger, PL/pgSQL: $by" "$PLAN_TARGET"
			paste "$results."{key_by_function,both_key} | awk '{ print $1 / $2 }' |
				plan_ratio 'one INSERT, row trigger: key by the function / both in one statement' "$KEY_TARGET"
			echo
		done
	done
}
