SELECT bench_bucket('one', 1e9, 1000);
