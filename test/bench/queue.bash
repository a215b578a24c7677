# shellcheck shell=bash disable=SC2034,SC2154 # round, seconds, T and others are script/bench's
#
# For script/bench: the queue of docs/queues.md, with the statements of the page.
#
# First 8 workers and 100 tenants, with limits and without: next_turn() against the usual
# fetch of the oldest job and its DELETE, which know no tenants.  A job takes 10 ms, so that
# 8 workers can run less than the 1,000 jobs a second that 100 tenants may start; or no
# time, under limits that refuse nothing.
#
# Then the time of a fetch from a table with 10,000 tenants, of which "huge" has a million
# ready jobs.  "Naive" takes the oldest job that rl_reserve allows.

QUEUE_TARGET=0.8
queue_limits='concurrent 3/1min, sliding_log 10/1s'
# A row: name, limits, milliseconds of a job, title.
queue_loads=(
	"work|$queue_limits|10|jobs of 10 ms, the limits of the page"
	'nothing|concurrent 1000/1min, sliding_log 100000/1s|0|jobs of 0 ms, limits that refuse nothing'
)
# A row: name, function, the tenant after which it looks, title.
queue_fetches=(
	'free|next_job|hugd|next_job: the tenant is free'
	'refused|next_job|hugd|next_job: it is refused, the next is free'
	'all|next_job|hugd|next_job: 100 tenants are refused'
	'none|next_job|huge|next_job: 100 tenants have no ready job'
	'horizon|next_job|hugd|next_job: free, after 100,000 deletes, no vacuum'
	'naive|naive_job|hugd|naive: the tenant is free'
	'naive_refused|naive_job|hugd|naive: it is refused'
)
QUEUE_PATIENCE=30

# use_limits LIMITS: gives the functions other limits.
use_limits() {
	sql -At -v limits="$1" >"$T/queue.sql" <<-'END'
		SELECT regexp_replace(pg_get_functiondef(oid), '''concurrent [^'']*''', quote_literal(:'limits')) || ';'
		FROM pg_proc WHERE proname IN ('next_job', 'naive_job');
	END
	sql -f "$T/queue.sql"
}

prepare_queue() {
	awk '/^```sql$/ { on = 1; next } /^```/ { on = 0 } on' "$SRC/docs/queues.md" >"$T/queue.sql"
	sql -o /dev/null -f "$T/queue.sql"
	sql <<-'SQL'
		DROP TRIGGER limit_jobs ON jobs;
		CREATE TABLE plain_jobs (LIKE jobs INCLUDING ALL EXCLUDING INDEXES, PRIMARY KEY (id));
		CREATE INDEX ON plain_jobs (run_at, id);
		CREATE FUNCTION plain_job(OUT place text, OUT id bigint, OUT attempt int, OUT payload jsonb) LANGUAGE plpgsql AS $$
		#variable_conflict use_column
		BEGIN
			UPDATE plain_jobs SET attempt = attempt + 1, run_at = now() + interval '1 min'
			WHERE id = (SELECT id FROM plain_jobs WHERE run_at <= now() ORDER BY run_at, id LIMIT 1 FOR UPDATE SKIP LOCKED)
			RETURNING '', id, attempt, plain_jobs.payload INTO place, id, attempt, payload;
		END $$;
		CREATE FUNCTION naive_job(after text, OUT place text, OUT id bigint, OUT attempt int, OUT payload jsonb) LANGUAGE plpgsql AS $$
		#variable_conflict use_column
		BEGIN
			UPDATE jobs SET attempt = attempt + 1, run_at = now() + interval '1 min'
			WHERE id = (SELECT job.id
				FROM (SELECT * FROM jobs WHERE run_at <= now() ORDER BY run_at, id FOR UPDATE SKIP LOCKED) AS job,
					rl_reserve(rl_key('job', tenant), 'concurrent 3/1min, sliding_log 10/1s', 1, job.id || '/' || attempt + 1)
				WHERE allowed LIMIT 1)
			RETURNING tenant, id, attempt, jobs.payload INTO place, id, attempt, payload;
		END $$;
		CREATE TABLE fetched (name text, us float8);
		CREATE PROCEDURE time_fetches(name text, function regproc, after text, times int) LANGUAGE plpgsql AS $$
		DECLARE
			began timestamptz;
			job record;
		BEGIN
			FOR i IN 1 .. times LOOP
				began := clock_timestamp();
				EXECUTE format('SELECT * FROM %s(%L)', function, after) INTO job;
				COMMIT;
				INSERT INTO fetched VALUES (name, extract(epoch FROM clock_timestamp() - began) * 1e6);
				IF job.id IS NOT NULL THEN
					PERFORM end_job(job.id, job.attempt);
					INSERT INTO jobs (payload, run_at) VALUES (job.payload, '-infinity');
				END IF;
				COMMIT;
			END LOOP;
		END $$;
	SQL
	cat >"$T/worker_limited.sql" <<-'END'
		SELECT coalesce(id, 0) AS id, coalesce(attempt, 0) AS attempt, (place = '')::int AS round FROM next_turn() \gset
		\if :id > 0
		\if :ms > 0
		\sleep :ms ms
		\endif
		SELECT end_job(:id, :attempt);
		\elif :round = 1
		\sleep 100 ms
		\endif
	END
	cat >"$T/worker_plain.sql" <<-'END'
		SELECT id, attempt FROM plain_job() \gset
		\if :ms > 0
		\sleep :ms ms
		\endif
		DELETE FROM plain_jobs WHERE (id, attempt) = (:id, :attempt);
	END
}

# run_workers NAME KIND TABLE MS: appends the jobs that 8 workers run in a second to the results.  They run for longer
# than other measurements, because each first connects and plans.
run_workers() {
	local length=$((seconds * 3)) jobs=$((seconds * 60000))
	sql -c "TRUNCATE $3" -c "INSERT INTO $3 (payload) SELECT jsonb_build_object('tenant', 't' || i % 100) FROM generate_series(1, $jobs) i" \
		-c "VACUUM ANALYZE $3" -c CHECKPOINT
	redis FLUSHALL >/dev/null
	run_on "$BIN/pgbench" -n -M prepared -c 8 -j 2 -T "$length" -D "ms=$4" -f "$T/worker_$2.sql"
	sql -At -c "SELECT ($jobs - count(*)) / $length.0 FROM $3" >>"$T/results/queue.$1.$2"
}

measure_queue() {
	local row name limits ms title
	for row in "${queue_loads[@]}"; do
		IFS='|' read -r name limits ms title <<<"$row"
		use_limits "$limits"
		run_workers "$name" limited jobs "$ms"
		run_workers "$name" plain plain_jobs "$ms"
	done
}

# hold_units COUNT: uses up the limits of "huge" and of the tenants after it, together so many.
hold_units() {
	sql -o /dev/null -c "SELECT count(rl_reserve(rl_key('job', tenant), 'concurrent 3/1h', 1, 'held ' || i))
		FROM (SELECT DISTINCT tenant FROM jobs WHERE tenant = 'huge' OR tenant < 't' || lpad('$1', 5, '0')) AS first, generate_series(1, 3) i
		WHERE tenant = 'huge' OR tenant < 't' || lpad(($1 - 1)::text, 5, '0')"
}

measure_fetches() {
	local row name function after title times old
	say 'a table with 10,000 tenants, one with a million ready jobs'
	use_limits 'concurrent 3/1h, sliding_log 100000/1s'
	sql <<-'END'
		TRUNCATE jobs;
		INSERT INTO jobs (payload, run_at) SELECT '{"tenant": "huge"}', '-infinity' FROM generate_series(1, 1000000);
		INSERT INTO jobs (payload) SELECT jsonb_build_object('tenant', 't' || lpad((i % 9999)::text, 5, '0')) FROM generate_series(1, 19998) i;
		VACUUM ANALYZE jobs;
	END
	for row in "${queue_fetches[@]}"; do
		IFS='|' read -r name function after title <<<"$row"
		redis FLUSHALL >/dev/null
		times=$((rounds * 200)) old=''
		case $name in
			refused | naive_refused) hold_units 1 ;;
			all) hold_units 100 ;;
			naive) sql -c 'CREATE INDEX naive ON jobs (run_at, id)' -c 'VACUUM ANALYZE jobs' ;;
			none) sql -c "UPDATE jobs SET run_at = 'infinity' WHERE tenant BETWEEN 't00000' AND 't00099'" -c 'VACUUM jobs' ;;
			horizon)
				"${AS[@]}" "$BIN/psql" -XqAt -c 'BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_sleep(600)' >/dev/null 2>&1 &
				old=$!
				await 10 old_snapshot
				sql -c "DELETE FROM jobs WHERE id IN (SELECT id FROM jobs WHERE tenant = 'huge' ORDER BY run_at, id LIMIT 100000)"
				times=$rounds
				;;
		esac
		[[ $name != naive_refused ]] || times=1
		sql -v ON_ERROR_STOP=0 -c "SET statement_timeout = '${QUEUE_PATIENCE}s'" -c "CALL time_fetches('$name', '$function', '$after', $times)" 2>"$T/out" ||
			grep -q 'statement timeout' "$T/out" || { cat "$T/out"; die "$title"; }
		if [[ -n $old ]]; then
			sql -o /dev/null -c "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'BEGIN ISOLATION%pg_sleep(600)'"
			wait "$old" || true
		fi
	done
}

old_snapshot() { [[ $(sql -At -c "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == 1 ]]; }

report_queue() {
	local row name limits ms title function after
	printf '| %-46s | %8s | %8s | %-24s |\n' '8 workers, 100 tenants; jobs a second' limits none ratio
	printf '|:%s-|%s:|%s:|:%s-|\n' ---------------------------------------------- --------- --------- ------------------------
	for row in "${queue_loads[@]}"; do
		IFS='|' read -r name limits ms title <<<"$row"
		paste "$T/results/queue.$name."{limited,plain} | awk '{ print $1 / $2 }' | sort -g | awk -v n="$title" -v target="$QUEUE_TARGET" \
			-v a="$(median "$T/results/queue.$name.limited")" -v b="$(median "$T/results/queue.$name.plain")" '
			NR == 1 { least = $1 } { most = $1; v[NR] = $1 } END {
				ratio = (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2
				printf "| %-46s | %8.0f | %8.0f | %.2f (%.2f to %.2f)%s |\n", n, a, b, ratio, least, most, (ratio >= target ? ", met" : ", missed") }'
	done
	echo
	echo "Target: at least $QUEUE_TARGET, median of the rounds."
	echo
	measure_fetches >&2
	printf '| %-48s | %9s | %9s | %9s |\n' '10,000 tenants, a million jobs; ms of a fetch' median p99 max
	printf '|:%s-|%s:|%s:|%s:|\n' ------------------------------------------------ ---------- ---------- ----------
	for row in "${queue_fetches[@]}"; do
		IFS='|' read -r name function after title <<<"$row"
		sql -At -F ' ' -c "SELECT percentile_disc(ARRAY[0.5, 0.99, 1]) WITHIN GROUP (ORDER BY us / 1000) FROM fetched WHERE name = '$name' HAVING count(*) > 0" |
			tr -d '{}' | tr , ' ' | awk -v n="$title" -v s="$QUEUE_PATIENCE" '
				{ printf "| %-48s | %9.2f | %9.2f | %9.2f |\n", n, $1, $2, $3 } END { if (!NR) printf "| %-48s | %9s | %9s | %9s |\n", n, "", "", "> " s "000" }'
	done
	echo
}
