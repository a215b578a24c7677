SELECT * FROM bench_nothing('one', 1000000000, 1000, 1);
