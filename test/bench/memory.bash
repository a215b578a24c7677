# shellcheck shell=bash disable=SC2154 # SRC, T and notes are script/bench's
#
# For script/bench: the memory of a key in Redis, the bytes of a call, and the
# memory of a state in shared memory.  The extension itself makes the keys.

# A row: number of keys, calls for each key, or with an r reservations, limits, title.  No state ends
# while a row is filled.
kinds=(
	'100000  1 1000/1d|throttle'
	'100000  1 token_bucket 1000/1d|token_bucket'
	'100000  1 fixed_window 1000/1d|fixed_window'
	'100000  1 sliding_window 1000/1d|sliding_window, 1 counter'
	'2000   61 sliding_window 1000/1d|sliding_window, all 61 counters'
	'100000  1 sliding_log 1000/1d|sliding_log, 1 action'
	'10000  10 sliding_log 1000/1d|sliding_log, 10 actions'
	'2000  100 sliding_log 1000/1d|sliding_log, 100 actions'
	'100  1000 sliding_log 1000/1d|sliding_log, 1,000 actions'
	'100000  1 1000/1h, 1000/1d|two throttles'
	'100000  1 1000/1d, fixed_window 1000/1d, sliding_log 1000/1d|throttle, fixed_window and sliding_log'
	'100000  2 1/1d ban 1d after 1000|throttle, refusals counted for a ban'
	'100000  2 1/1d ban 1d after 1|throttle, banned'
	'100000  r1 fixed_window 1000/1d|fixed_window, 1 reservation'
	'2000  r100 fixed_window 1000/1d|fixed_window, 100 reservations'
	'100  r1000 fixed_window 1000/1d|fixed_window, 1,000 reservations'
)
KEY=create_order:1000000	# all keys have this length

# memory_field NAME [SECTION]: prints a number of INFO.
memory_field() { redis INFO "${2:-memory}" | sed -nE "s/^$1:([0-9]+).*/\1/p"; }

# Prints used_memory when it changes only by the size of Redis's own buffers.
settled_memory() {
	local before=0 now
	while
		now=$(memory_field used_memory)
		((now - before > 4096 || before - now > 4096))
	do
		before=$now
		sleep 0.2
	done
	echo "$now"
}

# fill KEYS CALLS LIMITS: makes the keys.  24 minutes pass between the calls for a key, or
# 1 s with a log; the last call is for the present time.  Reservations are made at one time; their
# ids are UUIDs.
fill() {
	local step=1440 now i
	[[ $3 != *sliding_log* ]] || step=1
	now=$(date +%s)
	{
		echo "CREATE TEMP TABLE filled AS SELECT array_agg('create_order:' || 1000000 + i) AS keys FROM generate_series(1, $1) i;"
		[[ $2 != r* ]] || echo "SET ratelimit.debug_now = '${now}000000';
			SELECT count(*) FROM filled, unnest(keys) key, generate_series(1, ${2#r}) i,
				rl_reserve(key, '$3', 1, md5(i::text)::uuid::text, 86400) WHERE source = 'redis';"
		for ((i = 1; i <= ${2/r*/0}; i++)); do
			echo "SET ratelimit.debug_now = '$(((now - ($2 - i) * step) * 1000000))';"
			echo "SELECT count(*) FROM filled, rl_check_many(keys, '$3');"
		done
	} | sql -o /dev/null
}

# talk LIMITS: makes 1,000 calls, one after the other, for keys that fill has made.
talk() {
	sql -o /dev/null -c 'SET ratelimit.denial_cache = off' \
		-c "SELECT count(*) FROM generate_series(1, 1000) i, rl_check('create_order:' || 1000001 + i % 100, '$1')"
}

# Prints the mean MEMORY USAGE of a key's hash, over a hundred keys.
mean_usage() {
	redis --raw EVAL "
		local bytes, n = 0, 0
		for i = 1000001, 1000100 do
			local hash = 'rl:{create_order:' .. i .. '}'
			bytes, n = bytes + redis.call('MEMORY', 'USAGE', hash, 'SAMPLES', 0), n + 1
		end
		return math.floor(bytes / n + 0.5)" 0
}

memory_row() { printf '| %-46s | %7s | %12s | %11s | %7s | %8s |\n' "$@"; }

report_memory() {
	local kind title limits keys calls base bytes usage in out first second
	memory_row "the key of the limit: $KEY" keys 'MEMORY USAGE' used_memory sent received
	printf '|:%s-|%s:|%s:|%s:|%s:|%s:|\n' ---------------------------------------------- -------- ------------- ------------ -------- ---------
	for kind in "${kinds[@]}"; do
		title=${kind#*|}
		read -r keys calls limits <<<"${kind%|*}"
		# Buffers, scripts and the tables of an empty database do not count for the keys.
		redis FLUSHALL >/dev/null
		fill 1 "${calls/%[0-9]*/1}" "$limits"
		redis FLUSHALL >/dev/null
		base=$(settled_memory)
		fill "$keys" "$calls" "$limits"
		bytes=$(($(settled_memory) - base)) usage=$(mean_usage)
		[[ $(redis --raw EVAL "return #redis.call('KEYS', '*}')" 0) == "$keys" ]] || die "Redis does not have the keys of $title"
		redis CONFIG RESETSTAT >/dev/null
		talk "$limits"
		in=$(memory_field total_net_input_bytes stats) out=$(memory_field total_net_output_bytes stats)
		memory_row "$title" "$keys" "$usage" "$((bytes / keys))" "$((in / 1000))" "$((out / 1000))"
	done
	redis FLUSHALL >/dev/null
	session_memory
	redis FLUSHALL >/dev/null
	echo
	echo 'Bytes per key; sent and received: bytes per call for one key. used_memory is the growth of Redis, including the tables of keys.'
	first=$(shared_memory)
	stop_postgres
	start_postgres ratelimit.local_max_keys=100000
	second=$(shared_memory)
	echo "Shared memory: $(awk -v a="$first" -v b="$second" -v n="$((LOCAL_MAX_KEYS - 100000))" 'BEGIN { printf "%.0f", (a - b) / n }')" \
		"bytes for each of local_max_keys; $((second / 1000000)) MB for 100,000, of pg_shmem_allocations."
	echo
}

# Prints how much of a session's own memory its calls need.
session_memory() {
	# shellcheck disable=SC2016 # expanded by psql's shell
	local usage='\! awk "/^RssAnon/ { print \"kB\", \$2 }" /proc/$PID/status'
	echo
	sql -At >"$T/session" <<-END
		SELECT pg_backend_pid() AS pid \gset
		\setenv PID :pid
		$usage
		SELECT FROM rl_check('$KEY', '5/1h');
		$usage
		BEGIN;
		SELECT FROM rl_check_many((SELECT array_agg('charge:' || i) FROM generate_series(1, 65536) i), '5/1h refund_on_abort');
		$usage
		COMMIT;
	END
	awk '$1 == "kB" { kb[++n] = $2 }
		END { printf "A session: %d kB for its first call, and %d kB for 65,536 charges of a transaction, of RssAnon.\n", kb[2] - kb[1], kb[3] - kb[2] }' "$T/session"
}

shared_memory() { sql -At -c "SELECT allocated_size FROM pg_shmem_allocations WHERE name LIKE 'ratelimit %'"; }
