-- With "error", the default, the action fails with the error.
SET ratelimit.on_error = 'error';
SELECT * FROM rl_throttle('reply:laoqian', 15, 30, 60);

-- With "allow", every action is allowed.
SET ratelimit.on_error = 'allow';
SELECT * FROM rl_throttle('reply:laoqian', 15, 30, 60);

-- With "deny", every action is refused until Redis is back.
SET ratelimit.on_error = 'deny';
SELECT * FROM rl_throttle('reply:laoqian', 15, 30, 60);
