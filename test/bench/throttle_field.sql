SELECT (rl_throttle('one', 1000000000, 1000, 1)).allowed;
