# psycopg 2 with a pool of its own.
import contextlib

import psycopg2
import psycopg2.pool

import lines
import orders

pool = psycopg2.pool.ThreadedConnectionPool(1, 1, '')


@contextlib.contextmanager
def connection():
    taken = pool.getconn()
    taken.autocommit = True
    try:
        yield taken
    finally:
        pool.putconn(taken)


lines.serve(f'psycopg {psycopg2.__version__.split()[0]}, ThreadedConnectionPool', connection, psycopg2.Error, orders)
