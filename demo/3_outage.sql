-- By default nobody passes unasked: the error reaches whoever wanted to act.
SET ratelimit.on_error = 'error';
SELECT * FROM rl_throttle('reply:laoqian', 15, 30, 60);

-- "allow" goes on without limits ...
SET ratelimit.on_error = 'allow';
SELECT * FROM rl_throttle('reply:laoqian', 15, 30, 60);

-- ... and "deny" refuses until Redis is back.
SET ratelimit.on_error = 'deny';
SELECT * FROM rl_throttle('reply:laoqian', 15, 30, 60);
