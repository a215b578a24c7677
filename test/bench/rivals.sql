-- For rivals.bash: what limits orders.  As in setup.sql, the tables of counts survive a crash,
-- and their updates are HOT.

CREATE TABLE order_counts (
	customer int,
	day date,
	n int NOT NULL,
	PRIMARY KEY (customer, day)
) WITH (fillfactor = 50);

CREATE TABLE order_windows (
	customer int PRIMARY KEY,
	began timestamptz NOT NULL,
	n int NOT NULL
) WITH (fillfactor = 50);

-- A trigger as many applications write it.
CREATE FUNCTION locking_order() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
	w order_windows;
BEGIN
	LOOP
		SELECT * INTO w FROM order_windows WHERE customer = NEW.customer FOR UPDATE;
		EXIT WHEN FOUND;
		INSERT INTO order_windows VALUES (NEW.customer, clock_timestamp(), 0) ON CONFLICT DO NOTHING;
	END LOOP;
	IF w.began <= clock_timestamp() - interval '1 day' THEN
		w.began := clock_timestamp();
		w.n := 0;
	END IF;
	IF w.n >= TG_ARGV[0]::int THEN
		RAISE EXCEPTION 'too many orders' USING ERRCODE = 'PT429';
	END IF;
	UPDATE order_windows SET began = w.began, n = w.n + 1 WHERE customer = NEW.customer;
	RETURN NEW;
END
$$;

-- pgbench ends a client at the first error.
CREATE FUNCTION try_order(customer int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO orders (customer) VALUES ($1);
EXCEPTION WHEN SQLSTATE 'PT429' THEN
	NULL;
END
$$;

-- A table of orders for each kind of trigger.  A customer below 1,001 is never refused.
\set limits 'fixed_window ' :limit '/1d'
\set no_limits 'fixed_window ' :no_limit '/1d'

CREATE SCHEMA plain;
CREATE SCHEMA locking;
CREATE SCHEMA enforced;
CREATE TABLE plain.orders (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer int NOT NULL,
	at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE locking.orders (LIKE plain.orders INCLUDING ALL);
CREATE TABLE enforced.orders (LIKE plain.orders INCLUDING ALL);
CREATE TRIGGER few BEFORE INSERT ON locking.orders FOR EACH ROW WHEN (NEW.customer > 1000) EXECUTE FUNCTION locking_order(:limit);
CREATE TRIGGER many BEFORE INSERT ON locking.orders FOR EACH ROW WHEN (NEW.customer <= 1000) EXECUTE FUNCTION locking_order(:no_limit);
CREATE TRIGGER few BEFORE INSERT ON enforced.orders FOR EACH ROW WHEN (NEW.customer > 1000)
	EXECUTE FUNCTION rl_enforce('order:{customer}', :'limits');
CREATE TRIGGER many BEFORE INSERT ON enforced.orders FOR EACH ROW WHEN (NEW.customer <= 1000)
	EXECUTE FUNCTION rl_enforce('order:{customer}', :'no_limits');
