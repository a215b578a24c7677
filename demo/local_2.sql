-- What the server found when it started again. The orders and the counts are there.
SELECT local_persistence, local_recovery FROM rl_status();

SELECT customer, count(*) AS orders FROM orders GROUP BY customer;

-- The sixth order is still refused, and so is the customer who is banned.
INSERT INTO orders (customer) VALUES ('ada');

INSERT INTO orders (customer) VALUES ('bo');

INSERT INTO orders (customer) VALUES ('cy');
