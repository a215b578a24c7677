-- A shop with one rule: a customer may place a burst of five orders, and then one order every two seconds.
CREATE EXTENSION ratelimit;
CREATE TABLE orders (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer text NOT NULL,
	at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TRIGGER slow_down
	BEFORE INSERT ON orders
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', 'throttle 5/10s');

-- The limits in force, and the Redis that counts.
SELECT relation, key, limits, problem FROM rl_triggers;
SHOW ratelimit.redis_url;
