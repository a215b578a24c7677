-- The canonical text is a fixed point.
CREATE TABLE written (id int GENERATED ALWAYS AS IDENTITY, w text);
INSERT INTO written (w) VALUES
	('5/10s'), ('throttle 5/10s'), ('  THROTTLE   5 / 10 s  Burst 5 '), ('5/10s burst 7'), ('30/60s burst 15'), ('1/1.5h'),
	('1/0.25ms'), ('1/1us'), ('1/36h'), ('1/48h'), ('1/90s'), ('1/1.000000s'), ('1/0.000001s'), ('1/86400000ms'), ('1/.5s'),
	('token_bucket 1/1s burst 10'), ('fixed_window 5/1min from_first count_denied'), ('sliding_window 240/1h'),
	('sliding_window 240/1h step 1min'), ('sliding_window 10/1s'), ('sliding_window 10/7us'), ('sliding_window 10/61us'),
	('sliding_window 10/10s step 100ms'), ('sliding_log 5/10s, 1000/1d'),
	('sliding_log 100000/1d count_denied ban 1h after 3 refund_on_abort'), ('5/10s refund_on_abort ban 90min after 10'),
	('5/10s shadow'), ('sliding_log 5/10s, sliding_log 3/10s refund_on_abort shadow count_denied'),
	('fixed_window 5/10s Shadow from_first, fixed_window 5/10s from_first, fixed_window 5/10s shadow'), ('1/3650d'),
	('1000000000000000/1000000s burst 1000000'), ('5/min'), ('100/hour'), ('2/second'), ('3 / 2 Days burst 4'),
	('1/0.5minutes'), ('sliding_window 60/minute step second'), ('5/10s ban hours after 3'),
	('1/1s,2/2s,3/3s,4/4s,5/5s,6/6s,7/7s,8/8s'), ('Concurrent 3/1h'),
	('concurrent 1000/3650d ban 1h after 3, sliding_log 5/1h refund_on_abort'),
	('5/10s Ban 60s TO 24 hours after 5 refund_on_abort'), ('fixed_window 5/month ban h to d after 2'), ('5/10s ban 1h to 60min after 1');
SELECT id, w::rl_limits, w::rl_limits::text::rl_limits = w::rl_limits AS same FROM written ORDER BY id;
DROP TABLE written;

-- Errors show the position.
SELECT w, f.* FROM (VALUES
	(1, ''), (2, ' '), (3, ','), (4, '5'), (5, '5/'), (6, '/10s'), (7, '5/10'), (8, '5/10x'),
	(9, '5/10 sec'), (10, 'trottle 5/10s'), (11, '5/10s,'), (12, ', 5/10s'), (13, '5/10s 6/10s'),
	(14, '5/10s burst'), (15, '5/10s burst x'), (16, '5/10s burst 5 burst 6'), (17, '5.5/10s'),
	(18, '-5/10s'), (19, '5/-10s'), (20, '5/1.2.3s'), (21, '5/.s'), (22, '5/0.1us'),
	(23, 'sliding_log 5/10s burst 6'), (24, '5/10s from_first'), (25, '5/10s count_denied'),
	(26, '5/10s step 1s'), (27, 'sliding_window 5/10s step 0s'), (28, '5/10s ban 1h'),
	(29, '5/10s ban 1h after'), (30, '5/10s ban 1h after 0'), (31, '5/10s ban 0s after 1'),
	(32, '5/10s, 6/10s'), (33, 'fixed_window 5/10s, fixed_window 5/10s from_first'),
	(34, 'fixed_window 5/10s, fixed_window 6/10s count_denied'),
	(35, '1/1s,2/2s,3/3s,4/4s,5/5s,6/6s,7/7s,8/8s,9/9s'),
	(36, '5/10s'' OR 1'), (37, 'fünf/10s'), (38, '5/10µs'), (39, '5/99999999999999999999999999s'),
	(40, '5/0.00000000000000000000000000000001s'), (41, '5/10s ban 11000d after 1'), (42, '5x/10s'),
	(43, '5/.minute'), (44, '5/minutess'), (45, '5/ ,'), (46, '5/s10'), (47, '5/10s shadow shadow'),
	(48, '5/10s shadow ban 1h after 3'), (49, '5/10s ban 1h after 3 shadow'), (50, '5/10s shadow, 6/10s shadow'),
	(51, '5/10s count_denied shadow'), (52, 'shadow'), (53, '5/10s, shadow'),
	(54, '5/10s ban 1min to'), (55, '5/10s ban 1min to after 5'), (56, '5/10s ban 1min to 1x after 5'), (57, '5/10s ban 1min to 1d'),
	(58, '5/10s ban to 1d after 5'), (59, '5/10s ban 1min to 59s after 5'), (60, '5/10s ban 1min to 0s after 5'),
	(61, '5/10s ban 1min to 3653d after 5'), (62, '5/10s ban 1min to 1h to 1d after 5'), (63, '5/10s ban 1min to 1h after 5 shadow'),
	(64, '5/10s ban 1min to 1h after 5 ban 1min after 5'), (65, '5/10s ban 1min after 5 to 1h'), (66, '5/10s ban 1min to month after 5'),
	(71, 'concurrent 3/1h refund_on_abort'), (72, 'concurrent 3/1h count_denied'), (73, 'concurrent 3/1h from_first'),
	(74, 'concurrent 3/1h burst 5'), (75, 'concurrent 3/1h step 1min'), (76, 'concurrent 3/1h, sliding_log 3/1h, concurrent 4/1h'),
	-- Numbers out of range.
	(101, '0/10s'), (102, '5/0s'), (103, '5/10s burst 0'), (104, '1000000000000001/10s'),
	(105, '99999999999999999999/10s'), (106, '1/3653d'), (107, 'sliding_log 100001/1d'),
	(108, '1001/1us'), (109, '1/1d burst 36526'), (110, 'token_bucket 1/1d burst 36526'),
	(111, 'sliding_window 5/10s step 3s'), (112, 'sliding_window 5/101s step 1s'),
	(113, 'sliding_window 5/10s step 20s'), (114, 'concurrent 1001/1h'), (115, 'concurrent 0/1h'),
	-- unlimited and blocked are the whole text.
	(201, 'unlimited, 5/10s'), (202, '5/10s, unlimited'), (203, 'unlimited,'), (204, 'blocked blocked'), (205, ' blocked 5/10s'),
	(206, '5/10s blocked'), (207, 'unlimitedly'), (208, 'throttle unlimited'), (209, 'blocked, unlimited')
) v (id, w), LATERAL failure(format('SELECT %L::rl_limits', w)) f ORDER BY id;

-- The extreme numbers that are in range.
SELECT '1000000000000000/1000000s'::rl_limits, '1000/1us'::rl_limits, '1/1d burst 36525'::rl_limits, 'token_bucket 1/1d burst 36525'::rl_limits,
	'sliding_window 5/100s step 1s'::rl_limits, '5/10s ban 3652d after 1000000000000000'::rl_limits,
	'5/10s ban 1us to 3652d after 1'::rl_limits;

-- Casts, comparison, hashing, sorting, indexes.
SELECT '5/10s'::text::rl_limits, '5/10s'::varchar::rl_limits, '5/10s'::rl_limits = 'throttle 5/10000ms' AS equal, '5/10s'::rl_limits <> '5/11s' AS different,
	'5/10s'::rl_limits < '6/10s' AS less, NULL::rl_limits IS NULL AS is_null;
CREATE TABLE plans (name text PRIMARY KEY, limits rl_limits NOT NULL, note varchar DEFAULT '7/1h');
INSERT INTO plans VALUES ('free', '5/10s'), ('paid', '50/10s'), ('again', 'throttle 5/10s burst 5');
CREATE INDEX ON plans (limits);
CREATE INDEX ON plans USING hash (limits);
SELECT limits, count(*) FROM plans GROUP BY limits ORDER BY limits;
SELECT DISTINCT limits FROM plans ORDER BY limits DESC;
SELECT a.name, b.name FROM plans a JOIN plans b USING (limits) WHERE a.name < b.name;
CREATE TABLE copied (LIKE plans);
COPY plans TO '/dev/null' (FORMAT binary);
INSERT INTO copied SELECT name, limits::text, note FROM plans;
SELECT count(*) FROM copied JOIN plans USING (name, limits);
-- A column of either kind resolves the function.
SELECT name, (rl_peek('column:' || name, limits)).allowed, (rl_peek('column:' || name, note)).capacity FROM plans ORDER BY name;
DROP TABLE plans, copied;
PREPARE p (text, text) AS SELECT allowed, capacity FROM rl_check($1, $2);
EXECUTE p ('prepared', '5/10s');
PREPARE q (text, varchar) AS SELECT allowed, capacity FROM rl_check($1, $2);
EXECUTE q ('prepared', '5/10s');
PREPARE r AS SELECT allowed, capacity FROM rl_check($1, $2);
EXECUTE r ('prepared', '5/10s');

-- unlimited and blocked are the whole text.
SELECT w::rl_limits, w::rl_limits::text::rl_limits = w::rl_limits AS same FROM (VALUES ('unlimited'), (' BLOCKED ')) v (w);
CREATE TABLE plans (limits rl_limits);
INSERT INTO plans VALUES ('unlimited'), ('blocked'), ('5/10s'), ('Unlimited'), ('blocked');
CREATE INDEX ON plans (limits);
CREATE INDEX ON plans USING hash (limits);
SELECT limits, count(*) FROM plans GROUP BY limits ORDER BY limits;
SELECT (SELECT count(*) FROM plans a JOIN plans b USING (limits)), rl_limits_hash('unlimited') = rl_limits_hash(' unlimited') AS same,
	'unlimited'::rl_limits = 'blocked' AS equal, encode(rl_limits_send('Blocked'), 'escape') AS sent;
DROP TABLE plans;
-- Near misses have a hint that helps.
SELECT '5 per 10s'::rl_limits;
SELECT '5/10 sec'::rl_limits;
SELECT '100/hr'::rl_limits;
SELECT '1000/month'::rl_limits;
SELECT 'fixed_window 100/2weeks'::rl_limits;
SELECT '5/10s, sliding_log 1000000/1d'::rl_limits;
SELECT rl_sliding_log('k', 1000000, 86400);
SELECT 'concurrent 5000/1h'::rl_limits;
SELECT 'slidinglog 5/10s'::rl_limits;
SELECT 'none'::rl_limits;
SELECT '0/1min'::rl_limits;
SELECT '5/1min burst 0'::rl_limits;
SELECT '5/10s count_denied'::rl_limits;
SELECT 'sliding_log 5/10s lease 50ms'::rl_limits;
SELECT 'concurrent 5/1h refund_on_abort'::rl_limits;
SELECT 'fixed_window 5/day in UTC from_first'::rl_limits;
SELECT '5/1min, 10/1min'::rl_limits;
SELECT 'sliding_log 5/1min ban 1h'::rl_limits;
SELECT '1,000/1h'::rl_limits;
SELECT '5/1min burst=10'::rl_limits;
SELECT 'unlimited, 5/10s'::rl_limits;
