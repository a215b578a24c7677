-- Raises an error if Redis, which the pg_regress tests use, does not answer.
\getenv redis_url RATELIMIT_REDIS_URL
\if :{?redis_url}
SET ratelimit.redis_url = :'redis_url';
\endif
SET ratelimit.key_prefix = 'rl_test:';
SET ratelimit.connect_timeout = '10s';
SET ratelimit.command_timeout = '10s';
CREATE FUNCTION pg_temp.reset(text) RETURNS boolean AS 'ratelimit', 'rl_reset' LANGUAGE C;
SELECT pg_temp.reset('test');
