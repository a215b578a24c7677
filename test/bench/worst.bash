# shellcheck shell=bash disable=SC2154 # rounds, SRC and T are script/bench's
#
# For script/bench: the longest time that one call can occupy Redis.  The state is
# the largest that exists, in the layout of src/README.md: in each limit 100,000
# charged and 100,000 refused entries of one unit, at times that alternate.  A call for
# many keys has such a state in each of them, as far as they have a place in one call.

WORST_TARGET=5
WORST_BEGIN=1700000000000000
WORST_PERIOD=864000000000

# A row: the command of Redis that is measured; the time of the call (a number of
# entries after the oldest, or P+ this number, which is a period later); the SQL, or
# the number of charges to roll back; the title.  LIMITS stands for the limits, which
# all have count_denied, MANY for keys with this state, WINDOWS for sliding windows, and RECORDS
# for the limits of a key with 4,096 reservations.  UNITS stands for the limits of
# a key with 1,000 units, and HELD for 50 such keys.  LEVELS stands for eight keys with one such state each, of
# which the last one has reservations of all of them in its other fields, and PLANS for their limits: calls
# for them have at most eight logs, so the other limits are windows.  A second statement can be measured too.
worsts=(
	"EVAL|100010|SELECT FROM rl_peek('worst', 'LIMITS', 99999)|rl_peek of 99,999, refused"
	"EVAL|100010|SELECT FROM rl_peek('worst', 'LIMITS', 1)|rl_peek of 1, refused"
	"EVAL|100010|SELECT FROM rl_check('worst', 'LIMITS', 1)|rl_check of 1, refused and counted"
	"EVAL|100010|SELECT FROM rl_check('worst', 'LIMITS', 50000)|rl_check of 50,000, refused and counted"
	"EVAL|100010|SELECT FROM rl_check('worst', 'LIMITS', 100000)|rl_check of 100,000, refused and counted"
	"EVAL|100010|SELECT FROM rl_check('worst', 'LIMITS', 50000); SELECT FROM rl_check('worst', 'LIMITS', 50000); SELECT FROM rl_check('worst', 'LIMITS', 50000)|three of 50,000, refused and counted"
	"EVAL|100010|SELECT FROM rl_check_all('{worst,b,c,d,e,f,g,h}', array_prepend('LIMITS'::rl_limits, array_fill((SELECT string_agg(concat('fixed_window 60000/', i, 'h count_denied'), ',') FROM generate_series(1, 8) i)::rl_limits, '{7}')), array_fill(50000::bigint, '{8}'))|rl_check_all of 8 keys, 50,000 each, refused"
	"EVAL|100010|SELECT FROM rl_check_many(MANY, 'LIMITS', array_fill(50000::bigint, ARRAY[cardinality(MANY)]))|rl_check_many of 50,000 each, refused"
	"EVAL|P+50000|SELECT FROM rl_check_many(MANY, 'LIMITS')|rl_check_many when half of it has become free"
	"EVAL|100010|SELECT FROM rl_check_many((SELECT array_agg(concat('window', i)) FROM generate_series(1, 50) i), 'WINDOWS', array_fill(900::bigint, '{50}'))|rl_check_many, sliding windows of 101 counters"
	"EVAL|P+50000|SELECT FROM rl_check('worst', 'LIMITS', 1)|rl_check when half of it has become free"
	"EVAL|P+99000|SELECT FROM rl_check('worst', 'LIMITS', 1)|rl_check when nearly all has become free"
	"EVAL|P+200000|SELECT FROM rl_check('worst', 'LIMITS', 1)|rl_check when all has become free"
	"EVAL|100010|SELECT rl_refund('worst', 'LIMITS', 50000)|rl_refund of 50,000"
	"EVAL|100010|SELECT rl_refund('worst', 'LIMITS', 100000)|rl_refund of 100,000"
	"EVAL|100010|1|rollback of a charge in the middle"
	"EVAL|100010|16|rollback of 16 charges"
	"EVAL|P+50000|SELECT FROM rl_reserve('worst', 'LIMITS', 1, 'id'); SELECT rl_settle('worst', 'id', 0)|rl_reserve, rl_settle when half has become free"
	"EVAL|P+50000|SELECT FROM rl_reserve('worst', 'LIMITS', 1, 'id'); SELECT rl_settle('worst', 'id', 999999)|the same with a debt of 999,999"
	"EVAL|100010|SELECT FROM rl_reserve('records', 'RECORDS', 1, 'one more')|rl_reserve at 4,096 reservations, refused"
	"EVAL|1000|SELECT FROM rl_inspect('units') -- UNITS|rl_inspect of 1,000 reservations"
	"EVAL|P+0|SELECT FROM rl_reserve('records', 'RECORDS', 1, 'one more')|rl_reserve at 4,096 that have ended"
	"EVAL|P+0|SELECT rl_settle('records', 'first', 0)|rl_settle at 4,096 that have ended"
	"EVAL|1000|SELECT FROM rl_check_many(HELD, 'UNITS', array_fill(999::bigint, '{50}'))|rl_check_many of 999, 1,000 units are held"
	"EVAL|1000|SELECT 1 / rl_extend('units', 'id1000')::int; -- UNITS|rl_extend of one of 1,000 units at one time"
	"EVAL|P+50000|SELECT FROM rl_reserve_all(LEVELS, PLANS, array_fill(1::bigint, '{8}'), 'new')|rl_reserve_all of 8 keys, the last one is full"
	"EVAL|P+50001|SELECT 1 / rl_settle_all(LEVELS, 'first', '{0}')::int|rl_settle_all of 8 keys, the last one is full"
	"EVAL|P+50001|SELECT 1 / rl_settle_all(LEVELS, 'first', '{999999}')::int|the same with a debt of 999,999"
	"EVAL|100010|SELECT rl_reset('worst', 'LIMITS')|rl_reset of the limits"
	"UNLINK|100010|SELECT rl_reset('worst')|rl_reset of the key"
	"EXISTS|100010||expiry"
)

# worst_limits N: prints the text of N limits.
worst_limits() {
	local i text=''
	for ((i = 0; i < $1; i++)); do text+=", sliding_log 100000/$((WORST_PERIOD + i))us count_denied"; done
	echo "${text#, }"
}

# fill_worst N: writes the state of N limits.  ARGV is N, the time of the oldest entry, and the first period.
fill_worst() {
	redis --raw EVAL "
		local function fill(log, from)
			local index, chunks, tail = {}, 0
			for first = 0, 99999, 256 do
				local records = {}
				for i = first, math.min(first + 255, 99999) do
					records[#records + 1] = string.format('%016.0f000001', from + 10 * i)
				end
				if #records < 256 then
					-- The tail has the newest 32 records, and the other records are a chunk.
					tail = table.concat(records, '', #records - 31)
					for i = 1, 32 do records[#records] = nil end
				end
				redis.call('HSET', KEYS[1], log .. ':' .. chunks, table.concat(records))
				index[#index + 1] = string.sub(records[#records], 1, 16) .. string.format('%06.0f%010.0f', #records, chunks)
				chunks = chunks + 1
			end
			redis.call('HSET', KEYS[1], log .. ':chunks', table.concat(index),
				log, string.format('100000 0 0 0 0 %.0f %s', chunks, tail))
		end
		redis.call('DEL', KEYS[1])
		for limit = 0, ARGV[1] - 1 do
			local log = string.format('sliding_log:%.0f', ARGV[3] + limit)
			fill(log, tonumber(ARGV[2]))
			fill(log .. ':denied', ARGV[2] + 5)
		end
		return redis.call('PEXPIRE', KEYS[1], 3600000)" 1 'rl:{worst}' "$1" "$WORST_BEGIN" "$WORST_PERIOD" >/dev/null
}

# drop_denied HASH: deletes the logs of refused entries, because with them and reservations a key would have
# more than the most fields.
drop_denied() {
	redis --raw EVAL "
		for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
			if string.find(field, ':denied', 1, true) then redis.call('HDEL', KEYS[1], field) end
		end" 1 "$1" >/dev/null
}

# worst_many N: makes more keys with the state of N limits, and prints the array of all keys.
worst_many() {
	local i keys=worst
	for ((i = 2; i <= ($1 == 1 ? 9 : 2); i++)); do
		redis COPY 'rl:{worst}' "rl:{worst$i}" REPLACE >/dev/null
		keys+=",worst$i"
	done
	echo "'{$keys}'::text[]"
}

# worst_windows N TIME: writes 50 keys with N sliding windows that have all their counters
# then, and prints their limits.
worst_windows() {
	local i period text=''
	for ((i = 0; i < $1; i++)); do
		period=$((WORST_PERIOD + 100 * i))
		text+=", sliding_window 1000/${period}us step $((period / 100))us count_denied"
		redis EVAL "
			local newest = math.floor(ARGV[1] / ARGV[2])
			local counters = {string.format('505:505 %.0f:5:5', newest)}
			for k = newest - 100, newest - 1 do counters[#counters + 1] = string.format('%.0f:5:5', k) end
			for key = 1, 50 do
				redis.call('HSET', 'rl:{window' .. key .. '}', ARGV[3], table.concat(counters, ' '))
				redis.call('PEXPIRE', 'rl:{window' .. key .. '}', 3600000)
			end" 0 "$2" $((period / 100)) "sliding_window:$period:$((period / 100))" >/dev/null
	done
	echo "${text#, }"
}

# worst_records N: makes a key with 4,096 reservations under N limits, and prints these limits.
worst_records() {
	local i text=''
	for ((i = 0; i < $1; i++)); do text+=", sliding_window 100000/$((WORST_PERIOD + 100 * i))us step $((WORST_PERIOD / 100 + i))us"; done
	redis DEL 'rl:{records}' >/dev/null
	sql -o /dev/null -c "SET ratelimit.debug_now = '$WORST_BEGIN'" -c "SELECT FROM rl_reserve('records', '${text#, }', 1, 'first')"
	redis EVAL "
		local record = redis.call('HGET', KEYS[1], 'reserved:first')
		for n = 2, 4096 do redis.call('HSET', KEYS[1], 'reserved:' .. n, record) end" 1 'rl:{records}' >/dev/null
	echo "${text#, }"
}

# worst_units N: makes a key whose 1,000 units of N concurrent limits are all held until nearly the same time,
# and 50 keys "held" whose units are in one chunk, because those that came later are held for a shorter
# time.  Prints the limits.
worst_units() {
	local i text=''
	for ((i = 0; i < $1; i++)); do text+=", concurrent 1000/$((60 + i))min"; done
	redis DEL 'rl:{units}' 'rl:{held1}' >/dev/null
	sql -o /dev/null -c "SET ratelimit.debug_now = '$(worst_time 1000)'" \
		-c "SELECT count(rl_reserve('units', '${text#, }', 1, 'id' || n)) FROM generate_series(1, 1000) n" \
		-c "SELECT count(rl_reserve('held1', '${text#, }', 1, 'id' || n, CASE WHEN n < 66 THEN 3600 ELSE 1800 + n END)) FROM generate_series(1, 1000) n"
	for ((i = 2; i <= 50; i++)); do redis COPY 'rl:{held1}' "rl:{held$i}" REPLACE >/dev/null; done
	echo "${text#, }"
}

# worst_plans N: prints the array of the limits of eight keys, a log and N - 1 windows.
worst_plans() {
	local i text
	text=$(worst_limits 1)
	for ((i = 1; i < $1; i++)); do text+=", fixed_window 1000000/${i}000h"; done
	echo "array_fill('$text'::rl_limits, '{8}')"
}

# worst_levels N: makes eight keys with the state of a log, of which the last has open reservations of
# N limits of each key in its other fields, and prints the array of these keys.
worst_levels() {
	local keys="'{worst,worst2,worst3,worst4,worst5,worst6,worst7,worst8}'::text[]"
	redis DEL 'rl:{worst}' 'rl:{worst'{2..8}'}' 'rl:{levels}' >/dev/null
	sql -o /dev/null -c "SET ratelimit.debug_now = '$(worst_time P+50000)'" -c "SELECT FROM rl_reserve_all($keys,
		$(worst_plans "$1"), array_fill(1::bigint, '{8}'), 'first')"
	redis RENAME 'rl:{worst8}' 'rl:{levels}' >/dev/null
	fill_worst 1
	worst_many 1 >/dev/null
	drop_denied 'rl:{worst8}'
	redis EVAL "
		for _, field in ipairs(redis.call('HKEYS', KEYS[2])) do
			if not string.find(field, 'sliding_log', 1, true) then redis.call('HSET', KEYS[1], field, redis.call('HGET', KEYS[2], field)) end
		end
		local record = redis.call('HGET', KEYS[2], 'reserved:first')
		for i = redis.call('HLEN', KEYS[1]), 4094 do redis.call('HSET', KEYS[1], 'reserved:' .. i, record) end" 2 'rl:{worst8}' 'rl:{levels}' >/dev/null
	echo "$keys"
}

# longest COMMAND: prints the most microseconds of a command since slow_log.  COMMAND
# is the start of its name, because a session's first rollback sends EVAL, and later
# rollbacks send EVALSHA.  With a threshold of 0, the log also has commands of scripts.
slow_log() { redis SLOWLOG RESET >/dev/null; }
longest() {
	redis --no-raw SLOWLOG GET 1000 | awk -v name="\"$1" '
		/^ +3\) \(integer\)/ { us = $3 }
		/^ +4\) +1\)/ && index(toupper($3), name) == 1 && us > most { most = us }
		END { print most + 0 }'
}

# worst_time WHEN: prints the time of a row in microseconds.
worst_time() {
	local period=0
	[[ $1 != P+* ]] || period=$WORST_PERIOD
	echo $((WORST_BEGIN + period + 10 * ${1#P+}))
}

# measure_worst LIMITS COMMAND WHEN SQL: prints microseconds.
measure_worst() {
	local limits when i call charges=''
	limits=$(worst_limits "$1")
	when="SET ratelimit.debug_now = '$(worst_time "$3")';"
	if [[ $4 =~ ^[0-9]+$ ]]; then
		# The charges have times of entries that fill_worst writes afterwards.
		for ((i = 0; i < $4; i++)); do
			charges+="SET LOCAL ratelimit.debug_now = '$((WORST_BEGIN + 10 * (50000 + i * 3001)))';"
			charges+="SELECT FROM rl_check('worst', '${limits//count_denied/refund_on_abort}');"
		done
		redis DEL 'rl:{worst}' >/dev/null
		{
			echo "BEGIN; $charges $when"
			# The server waits for this, and so does the rollback.
			printf '\\! touch %q; until test -e %q; do sleep 0.01; done\n' "$T/tmp/charged" "$T/tmp/filled"
			echo 'ROLLBACK;'
		} | sql -o /dev/null 2>/dev/null &
		await 10 test -e "$T/tmp/charged" || die 'the charges were not made'
		fill_worst "$1"
		slow_log
		"${AS[@]}" touch "$T/tmp/filled"
		wait $!
		"${AS[@]}" rm "$T/tmp/charged" "$T/tmp/filled"
	elif [[ -z $4 ]]; then
		fill_worst "$1"
		redis PEXPIRE 'rl:{worst}' 1 >/dev/null
		slow_log
		redis EXISTS 'rl:{worst}' >/dev/null
	else
		fill_worst "$1"
		call=${4//LIMITS/$limits}
		[[ $call != *MANY* ]] || call=${call//MANY/$(worst_many "$1")}
		[[ $call != *RECORDS* && $call != *records* ]] || call=${call//RECORDS/$(worst_records "$1")}
		[[ $call != *UNITS* ]] || call=${call//UNITS/$(worst_units "$1")}
		call=${call//HELD/"'{$(printf 'held%d,' {1..49})held50}'::text[]"}
		[[ $call != *LEVELS* ]] || call=${call//LEVELS/$(worst_levels "$1")} call=${call//PLANS/$(worst_plans "$1")}
		[[ $call != *WINDOWS* ]] || call=${call//WINDOWS/$(worst_windows "$1" "$(worst_time "$3")")}
		slow_log
		# A key with too many reservations raises an error.
		sql -o /dev/null -c "$when" -c "$call" 2>/dev/null || [[ $call == *records* ]]
	fi
	longest "$2"
}

report_worst() {
	local row command when sql title limits round one eight
	printf '| %-46s | %9s | %9s | %8s | %-6s |\n' 'a call: ms in Redis' '1 limit' '8 limits' target ''
	printf '|:%s-|%s:|%s:|%s:|:%s-|\n' ---------------------------------------------- ---------- ---------- --------- ------
	redis CONFIG SET slowlog-log-slower-than 0 slowlog-max-len 1000 >/dev/null
	# Makes the scripts known to Redis.
	sql -o /dev/null -c "SELECT rl_check('worst', 'sliding_log 5/1d refund_on_abort'), rl_refund('worst', 'sliding_log 5/1d', 1),
		rl_reset('worst', 'sliding_log 5/1d')" -c 'BEGIN' -c "SELECT rl_check('worst', 'sliding_log 5/1d refund_on_abort')" -c 'ROLLBACK'
	for row in "${worsts[@]}"; do
		IFS='|' read -r command when sql title <<<"$row"
		for limits in 1 8; do
			for ((round = 1; round <= rounds; round++)); do
				measure_worst "$limits" "$command" "$when" "$sql"
			done >"$T/worst.$limits"
		done
		one=$(median "$T/worst.1") eight=$(median "$T/worst.8")
		awk -v n="$title" -v one="$one" -v eight="$eight" -v target="$WORST_TARGET" 'BEGIN {
			printf "| %-46s | %9.2f | %9.2f | %8s | %-6s |\n", n, one / 1000, eight / 1000, "<= " target,
				one <= target * 1000 && eight <= target * 1000 ? "met" : "missed" }'
	done
	redis CONFIG SET slowlog-log-slower-than 10000 slowlog-max-len 128 >/dev/null
	redis --raw EVAL "for _, key in ipairs(redis.call('KEYS', 'rl:{[hlruw]*')) do redis.call('UNLINK', key) end" 0 >/dev/null
	echo
	echo "Each limit has 100,000 charged and 100,000 refused entries. The figure is the call's longest script in SLOWLOG; medians of $rounds rounds."
	echo
}
