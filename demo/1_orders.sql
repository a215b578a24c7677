-- A shop, and one rule: a customer may order five times at once, and then once in two seconds.
CREATE EXTENSION ratelimit;
CREATE TABLE orders (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer text NOT NULL,
	at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TRIGGER slow_down
	BEFORE INSERT ON orders
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', 'throttle 5/10s');

-- What is in force, and in which Redis it is counted.
SELECT relation, key, limits, problem FROM rl_triggers;
SHOW ratelimit.redis_url;
