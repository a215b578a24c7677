# pg_regress runs psql by this script: a result has a line of names, and a line for each row.
exec "$@" --no-align --pset=footer=off
