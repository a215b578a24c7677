-- Deletes the keys of this run.
LOAD 'ratelimit';
SELECT current_setting('ratelimit.redis_url') AS url, current_setting('ratelimit.key_prefix') || '*' AS pattern \gset
\setenv RATELIMIT_REDIS_URL :url
\setenv RATELIMIT_KEYS :pattern
\! sh "$PG_ABS_SRCDIR/delete_keys.sh"
