\set i random_zipfian(1, :keys, 1.1)
SELECT * FROM rl_check('many:' || :i, '10000000/1s burst 5000000 lease 50ms');
