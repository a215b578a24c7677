# shellcheck shell=bash disable=SC2153,SC2154 # cores, seconds, T and others are script/bench's
#
# For script/bench: reservations.  Each transaction has a statement of rl_check, rl_reserve,
# rl_settle with less than was reserved, and rl_refund, under the same limits, for one of
# 1,000 keys.  So the four times of a round are of the same moments.  Then the longest time
# that a call can occupy Redis, for a key with 4,096 fields: reservations of eight limits, or
# logs that are as large as can be.

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
	report_records
}

RECORDS=4096
records_limits=$(for i in {1..8}; do printf ', %s' "token_bucket 100/${i}h"; done)
records_limits=${records_limits#, }
# A row: open, ended or half, which records have ended; or logs, for four logs of 100,000
# entries; the command of Redis that is measured; the SQL; the title.
records_rows=(
	"open|EVAL|SELECT rl_reserve('worst', 'LIMITS', 1, 'new')|rl_reserve, all are open: an error"
	"half|EVAL|SELECT rl_reserve('worst', 'LIMITS', 1, 'new')|rl_reserve, half have ended"
	"ended|EVAL|SELECT rl_reserve('worst', 'LIMITS', 1, 'new')|rl_reserve, all have ended"
	"open|EVAL|SELECT rl_settle('worst', '7', 0)|rl_settle of less"
	"open|EVAL|SELECT rl_settle('worst', '7', 1000000)|rl_settle of more"
	"half|EVAL|SELECT rl_extend('worst', '8')|rl_extend"
	"ended|EVAL|SELECT rl_check('worst', 'LIMITS')|rl_check, all have ended"
	"open|EVAL|SELECT rl_refund('worst', 'LIMITS', 1)|rl_refund"
	"open|EVAL|SELECT rl_reset('worst', 'LIMITS')|rl_reset of the limits"
	"open|EVAL|SELECT rl_inspect('worst')|rl_inspect"
	"open|UNLINK|SELECT rl_reset('worst')|rl_reset of the key"
	"open|EXISTS||expiry"
	"logs|EVAL|SELECT rl_reserve('worst', 'LOGS', 1, 'new')|rl_reserve, four full logs"
	"logs|EVAL|SELECT rl_settle('worst', 'old', 0)|rl_settle of less, four full logs"
	"logs|EVAL|SELECT rl_settle('worst', 'old', 100000)|rl_settle of more, four full logs"
	"logs|EVAL|SELECT rl_extend('worst', 'old')|rl_extend, four full logs"
)

# fill_records HOW: makes the key.
fill_records() {
	local logs
	if [[ $1 == logs ]]; then
		logs=$(worst_limits 4)
		fill_worst 4
		drop_denied 'rl:{worst}'
		sql -o /dev/null -c "SET ratelimit.debug_now = '$(worst_time P+50000)'" -c "SELECT rl_reserve('worst', '$logs', 25000, 'old')"
		return
	fi
	redis DEL 'rl:{worst}' >/dev/null
	sql -o /dev/null -c "SET ratelimit.debug_now = '$(worst_time 0)'" -c "SELECT rl_reserve('worst', '$records_limits', 50, '0', 86400)"
	redis --raw EVAL "
		local record = redis.call('HGET', KEYS[1], 'reserved:0')
		for i = redis.call('HLEN', KEYS[1]), $RECORDS - 1 do
			local ended = ARGV[1] == 'ended' or ARGV[1] == 'half' and i % 2 == 1
			redis.call('HSET', KEYS[1], 'reserved:' .. i, ended and string.gsub(record, '^%d+', '1000000') or record)
		end" 1 'rl:{worst}' "$1" >/dev/null
}

report_records() {
	local row how command call title
	printf '| %-46s | %9s | %8s | %-6s |\n' "$RECORDS fields: ms in Redis" longest target ''
	printf '|:%s-|%s:|%s:|:%s-|\n' ---------------------------------------------- ---------- --------- ------
	redis CONFIG SET slowlog-log-slower-than 0 slowlog-max-len 1000 >/dev/null
	for row in "${records_rows[@]}"; do
		IFS='|' read -r how command call title <<<"$row"
		call=${call//LIMITS/$records_limits}
		[[ $call != *LOGS* ]] || call=${call//LOGS/$(worst_limits 4)}
		for _ in $(seq "$rounds"); do
			fill_records "$how"
			if [[ -z $call ]]; then
				redis PEXPIRE 'rl:{worst}' 1 >/dev/null
				slow_log
				redis EXISTS 'rl:{worst}' >/dev/null
			else
				slow_log
				# At the most records, an error is the answer.
				sql -o /dev/null -c "SET ratelimit.debug_now = '$(worst_time "$([[ $how == logs ]] && echo P+50010 || echo 10)")'" -c "$call" 2>"$T/out" ||
					grep -q 'too many reservations' "$T/out" || { cat "$T/out"; die "$title"; }
			fi
			longest "$command"
		done >"$T/worst.records"
		awk -v n="$title" -v us="$(median "$T/worst.records")" -v target="$WORST_TARGET" 'BEGIN {
			printf "| %-46s | %9.2f | %8s | %-6s |\n", n, us / 1000, "<= " target, us <= target * 1000 ? "met" : "missed" }'
	done
	redis CONFIG SET slowlog-log-slower-than 10000 slowlog-max-len 128 >/dev/null
	redis DEL 'rl:{worst}' >/dev/null
	echo
}
