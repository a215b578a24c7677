\set i random(1, 100000)
SELECT bench_bucket('many:' || :i, 1e9, 1000);
