-- The same shop without Redis: the limits count in PostgreSQL's shared memory, and are kept in a file.
CREATE EXTENSION ratelimit;
CREATE TABLE orders (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer text NOT NULL
);
CREATE TRIGGER slow_down
	BEFORE INSERT ON orders
	FOR EACH ROW EXECUTE FUNCTION rl_enforce('order:{customer}', 'throttle 5/1h');

SELECT store, local_persistence FROM rl_status();

-- Five orders at once, and a ban.
INSERT INTO orders (customer) SELECT 'ada' FROM generate_series(1, 5);

SELECT rl_ban('order:bo', 3600);
