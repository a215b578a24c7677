# shellcheck shell=bash disable=SC2153,SC2154 # cores, seconds, T and others are script/bench's
#
# For script/bench: reservations.  Each transaction has a statement of rl_check, rl_reserve,
# rl_settle with less than was reserved, and rl_refund, under the same limits, for one of
# 1,000 keys.  So the four times of a round are of the same moments.

RESERVE_TARGET=1.35
SETTLE_TARGET=1.2
reserve_limits=('1000000/1s' 'token_bucket 1000000/1s burst 100000000' 'fixed_window 100000000/1d'
	'1000000/1s, fixed_window 100000000/1d' 'sliding_window 100000000/1d' 'concurrent 100/1h')
reserve_calls=(rl_check rl_reserve rl_settle rl_refund)

# measure_reserve MODE: appends the microseconds of each statement to the results.
measure_reserve() {
	local i us
	for i in "${!reserve_limits[@]}"; do
		cat >"$T/reserve.sql" <<-END
			\set key random(1, 1000)
			\set id random(1, 1000000000000)
			SELECT allowed FROM rl_check('check:' || :key, '${reserve_limits[i]}', 2);
			SELECT allowed FROM rl_reserve('reserve:' || :key, '${reserve_limits[i]}', 2, :id::text);
			SELECT rl_settle('reserve:' || :key, :id::text, 1);
			SELECT rl_refund('check:' || :key, '${reserve_limits[i]}', 2);
		END
		# The first run makes the keys.
		((round > 1)) || run_on "$BIN/pgbench" -n -M prepared -t 5000 -f "$T/reserve.sql"
		run_on "$BIN/pgbench" -n -M prepared -r -T "$seconds" -f "$T/reserve.sql"
		us=$(sed -nE 's/^ +([0-9.]+) .*(rl_[a-z]+)\(.*/\1/p' "$T/out" | awk '{ printf "%.1f ", $1 * 1000 }')
		(($(wc -w <<<"$us") == ${#reserve_calls[@]})) || die "pgbench printed no times of statements"
		echo "$us" >>"$T/results/$1.reserve.$i"
	done
}

# reserve_median RESULT EXPRESSION: prints the median over the rounds.
reserve_median() { awk "{ print $2 }" "$T/results/$1" | median; }

report_reserve() {
	local mode i
	for mode in "${modes[@]}"; do
		[[ -s $T/results/$mode.reserve.0 ]] || continue
		printf '| %-46s | %8s | %10s | %9s | %9s | %-14s | %-13s |\n' "${MODE[$mode]}; us" "${reserve_calls[@]}" reserve/check settle/check
		printf '|:%s-|%s:|%s:|%s:|%s:|:%s-|:%s-|\n' ---------------------------------------------- --------- ----------- ---------- ---------- -------------- -------------
		for i in "${!reserve_limits[@]}"; do
			awk -v n="${reserve_limits[i]}" -v a="$(reserve_median "$mode.reserve.$i" '$1')" -v b="$(reserve_median "$mode.reserve.$i" '$2')" \
				-v c="$(reserve_median "$mode.reserve.$i" '$3')" -v d="$(reserve_median "$mode.reserve.$i" '$4')" \
				-v r="$(reserve_median "$mode.reserve.$i" '$2 / $1')" -v s="$(reserve_median "$mode.reserve.$i" '$3 / $1')" \
				-v rt="$RESERVE_TARGET" -v st="$SETTLE_TARGET" 'BEGIN {
				printf "| %-46s | %8.1f | %10.1f | %9.1f | %9.1f | %.2f, %-8s | %.2f, %-7s |\n", n, a, b, c, d,
					r, r <= rt ? "met" : "missed", s, s <= st ? "met" : "missed" }'
		done
		echo
	done
	echo "Targets: rl_reserve at most $RESERVE_TARGET times, rl_settle at most $SETTLE_TARGET times rl_check."
	echo
}
