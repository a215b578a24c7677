SELECT bench_plpython();
