SELECT * FROM rl_check('one', '10000000/1s burst 5000000 lease 50ms');
