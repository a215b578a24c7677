-- GCRA in virtual time. Expected answers are derived by hand from the rules:
-- a quota takes interval = period / rate to leak, the backlog may be at most
-- capacity * interval after an action, remaining is the room in whole quotas.

-- The book's example: an interval of 2 s, room for 15.
SELECT * FROM run(
	$$at(0)$$,
	$$SELECT * FROM rl_throttle('laoqian:reply', 15, 30, 60)$$,
	$$SELECT count(*) FILTER (WHERE (rl_throttle('laoqian:reply', 15, 30, 60)).allowed) FROM generate_series(1, 14)$$,
	$$SELECT * FROM rl_throttle('laoqian:reply', 15, 30, 60)$$,
	$$at(1.999999)$$,
	$$SELECT * FROM rl_throttle('laoqian:reply', 15, 30, 60)$$,
	$$at(2)$$,
	$$SELECT * FROM rl_throttle('laoqian:reply', 15, 30, 60)$$,
	-- The text form is the same limit with the same state.
	$$SELECT * FROM rl_check('laoqian:reply', 'throttle 30/60s burst 15')$$,
	$$at(4)$$,
	$$SELECT * FROM rl_check('laoqian:reply', '30/1min burst 15')$$);

-- '5/10s': interval 2 s. Five at once, then one each 2 s.
SELECT * FROM play('burst', '5/10s', ARRAY[
	[0,1], [0,1], [0,1], [0,1], [0,1],	-- 4 3 2 1 0 remain; reset after 2 4 6 8 10
	[0,1],								-- refused: retry after 2
	[1.9,1],							-- refused: retry after 0.1, backlog 8.1
	[2,1],								-- the first that has leaked
	[9.999999,1],						-- backlog 2.000001: 2 remain after it
	[30,1]]) UNION ALL					-- full again
-- A quota above 1, a quota of 0, and a quota above the capacity.
SELECT * FROM play('quota', '10/10s', ARRAY[
	[0,4],								-- 6 remain
	[0,7],								-- refused: needs 1 more, 1 s
	[0,6],								-- 0 remain
	[0,0],								-- looks: allowed, nothing taken
	[0,10],								-- refused for 10 s
	[0,11],								-- impossible
	[10,10], [10,0]]) UNION ALL
-- Below an interval of a millisecond remaining is counted in nanoseconds:
-- 3 a millisecond is an interval of 333333 ns.
SELECT * FROM play('nanoseconds', '3/1ms', ARRAY[
	[0,1], [0,1], [0,1],				-- reset after 0.000334 0.000667 0.001
	[0,1],								-- retry after 0.000334 (333333 ns rounded up)
	[0.000333,1],						-- 333333 ns are not over yet
	[0.000334,1]]) UNION ALL			-- they are
-- The same at one in ten periods of redis-cell's whole microseconds:
-- 7 a second is an interval of 142857142 ns, 142857 us of which show.
SELECT * FROM play('whole microseconds', '7/1s', ARRAY[
	[0,1], [0,6], [0,1], [0.142857,1], [0.142858,1]]);
-- Other numbers for the same period apply to the stored TAT.
SELECT at(0) \g /dev/null
SELECT * FROM rl_throttle('numbers', 10, 10, 10, 10) UNION ALL
SELECT * FROM rl_throttle('numbers', 5, 10, 10) UNION ALL		-- 10 s of backlog, room for 5 s
SELECT * FROM rl_throttle('numbers', 20, 10, 10) UNION ALL		-- room for 20 s
SELECT * FROM rl_throttle('numbers', 20, 20, 10, 0) UNION ALL	-- interval 0.5 s: room for 10 s, over capacity
SELECT * FROM rl_throttle('numbers', 20, 10, 20);		-- another period, another state

-- Several limits: all or none, and the binding one answers.
SELECT * FROM play('several', '2/10s, 3/1min', ARRAY[
	[0,1],								-- 1 of 2 remains
	[0,1],								-- 0 of 2
	[0,1],								-- refused by 2/10s for 5 s
	[5,1],								-- 0 of 2 remain, 0 of 3 too: the first
	[10,1],								-- refused by 3/1min for 10 s
	[10,3],								-- more than 2: impossible
	[20,1], [1000,2], [1000,1]]);
SELECT * FROM run(
	$$at(1000)$$,
	$$SELECT * FROM rl_peek('several', '2/10s, 3/1min') UNION ALL
	SELECT * FROM rl_peek('several', '3/1min', 2)$$,
	-- A refused call has charged neither.
	$$at(2000)$$,
	$$SELECT allowed FROM rl_check('neither', '1/10s')$$);
CREATE TEMP TABLE before AS SELECT * FROM rl_peek('neither', '1/10s, 100/1h');
SELECT * FROM run(
	$$SELECT allowed, capacity, retry_after FROM rl_check('neither', '1/10s, 100/1h')$$,
	$$SELECT count(*) FROM (SELECT * FROM before INTERSECT SELECT * FROM rl_peek('neither', '1/10s, 100/1h')) same$$,
	-- The longest limits: 100 years to drain, in nanoseconds.
	$$SELECT * FROM play('years', '1/3650d burst 10', ARRAY[
		[0,9], [0,2], [0,1], [0,1], [315359999.999999,1], [315360000,1]])$$,
	$$SELECT * FROM play('finest', '1000/1us burst 1000000000', ARRAY[[0,1], [0,999999999], [0,1], [0.000001,1000], [0.000001,1]])$$,
	-- Refunds: at most the used quota, and an absent key stays absent.
	$$at(0)$$,
	$$SELECT (rl_throttle('refund', 10, 10, 10, 8)).remaining, rl_refund('refund', '10/10s', 3)$$,
	$$SELECT remaining, reset_after FROM rl_peek('refund', '10/10s', 0)$$,
	$$rl_refund('refund', '10/10s', 100)$$,
	$$SELECT remaining, reset_after FROM rl_peek('refund', '10/10s', 0)$$,
	$$SELECT rl_refund('refund', '10/10s', 0), rl_refund('absent', '10/10s', 3), rl_reset('absent')$$);

-- The store's own clock.
RESET ratelimit.debug_now;
SELECT * FROM run(
	$$SELECT allowed, capacity, remaining, retry_after, reset_after, source FROM rl_throttle('clock', 15, 30, 60)$$,
	$$SELECT bool_and((rl_throttle('clock', 15, 30, 60)).allowed) FROM generate_series(1, 14)$$,
	$$SELECT allowed, remaining, retry_after > 1 AND retry_after < 2 AS nearly_two FROM rl_throttle('clock', 15, 30, 60)$$,
	-- A refund with a borrow of nanoseconds: intervals of 333333 ns and 142857 ns.
	$$at(0)$$,
	$$SELECT (rl_throttle('borrow', 3, 3, 0.001)).reset_after, rl_refund('borrow', '7/1ms', 1)$$,
	$$SELECT remaining FROM rl_peek('borrow', '1000000/1ms burst 190477', 0)$$);	-- 190476 ns are left
