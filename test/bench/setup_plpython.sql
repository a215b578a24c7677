-- Makes the same call to Redis as rl_throttle, through redis-py.  The first call of
-- a session reads the command that script/bench recorded, and connects.
CREATE EXTENSION plpython3u;
CREATE TABLE bench_call (socket text NOT NULL, words text[] NOT NULL);
CREATE FUNCTION bench_plpython() RETURNS bigint LANGUAGE plpython3u AS $$
if 'call' not in SD:
	import redis
	row = plpy.execute('SELECT socket, words FROM bench_call')[0]
	SD['call'] = redis.Redis(unix_socket_path=row['socket']).execute_command
	SD['words'] = row['words']
return SD['call'](*SD['words'])
$$;
