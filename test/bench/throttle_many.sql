\set i random(1, 100000)
SELECT * FROM rl_throttle('many:' || :i, 1000000000, 1000, 1);
