\set i random(1, :keys)
SELECT * FROM rl_check('many:' || :i, '10000000/1s burst 5000000 lease 50ms');
