-- The orders that were inserted.
SELECT customer, count(*) AS orders FROM orders GROUP BY customer ORDER BY customer;

-- The error for a customer that orders too fast, and the state of the limit for all four customers.
INSERT INTO orders (customer) SELECT 'cy' FROM generate_series(1, 6);
SELECT c AS customer, p.allowed, p.remaining, round(p.retry_after::numeric, 1) AS retry_after
	FROM unnest(ARRAY['ada', 'bo', 'cy', 'di']) AS c
	CROSS JOIN LATERAL rl_peek('order:' || c, 'throttle 5/10s') AS p;

-- A ban refuses the customer under any limit. Then the ban is ended, and the state of the key is deleted.
SELECT rl_ban('order:cy', 3600);
INSERT INTO orders (customer) VALUES ('cy');

SELECT rl_unban('order:cy'), rl_reset('order:cy');
INSERT INTO orders (customer) VALUES ('cy');

-- A function instead of a trigger: a burst of fifteen replies, then thirty replies a minute.
SELECT * FROM rl_throttle('reply:laoqian', 15, 30, 60);

-- A function in a query: which orders get a receipt now, if a customer gets at most two receipts a minute?
SELECT o.id, o.customer, d.allowed, d.remaining, round(d.retry_after::numeric, 1) AS retry_after
	FROM (SELECT id, customer FROM orders ORDER BY id LIMIT 8) AS o
	CROSS JOIN LATERAL rl_throttle('receipt:' || o.customer, 2, 2, 60) AS d;

-- A function in a procedure: a burst of three codes by SMS, then one code a minute.
CREATE PROCEDURE send_code(phone text) LANGUAGE plpgsql AS $$
DECLARE
	d rl_decision;
BEGIN
	SELECT * INTO d FROM rl_throttle('sms:' || phone, 3, 1, 60);
	IF d.allowed THEN
		RAISE NOTICE 'a code goes to %, % more may follow', phone, d.remaining;
	ELSE
		RAISE NOTICE 'no code for % during the next % seconds', phone, ceil(d.retry_after);
	END IF;
END
$$;
CALL send_code('555-0101');
CALL send_code('555-0101');
CALL send_code('555-0101');
CALL send_code('555-0101');
CALL send_code('555-0199');
