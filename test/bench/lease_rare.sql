SELECT * FROM rl_check('rare', '10000000/1s burst 5000000 lease 50ms');
\sleep 4 ms
