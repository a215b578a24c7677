-- The orders that got through.
SELECT customer, count(*) AS orders FROM orders GROUP BY customer ORDER BY customer;

-- The trigger's answer to the one who does not stop, and how the limit stands for the others.
INSERT INTO orders (customer) SELECT 'cy' FROM generate_series(1, 6);
SELECT c AS customer, p.allowed, p.remaining, round(p.retry_after::numeric, 1) AS retry_after
	FROM unnest(ARRAY['ada', 'bo', 'cy', 'di']) AS c
	CROSS JOIN LATERAL rl_peek('order:' || c, 'throttle 5/10s') AS p;

-- Enough: a ban holds whatever the limit says. Then it is lifted, and all is forgotten.
SELECT rl_ban('order:cy', 3600);
INSERT INTO orders (customer) VALUES ('cy');

SELECT rl_unban('order:cy'), rl_reset('order:cy');
INSERT INTO orders (customer) VALUES ('cy');

-- The same without a trigger. Fifteen replies at once, then thirty a minute:
SELECT * FROM rl_throttle('reply:laoqian', 15, 30, 60);

-- In a query: which of the first orders may be mailed a receipt now, at most two a customer and minute?
SELECT o.id, o.customer, d.allowed, d.remaining, round(d.retry_after::numeric, 1) AS retry_after
	FROM (SELECT id, customer FROM orders ORDER BY id LIMIT 8) AS o
	CROSS JOIN LATERAL rl_throttle('receipt:' || o.customer, 2, 2, 60) AS d;

-- In a procedure: a code by SMS, three times, then one a minute.
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
