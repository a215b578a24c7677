# psycopg 3 with psycopg_pool.
import os

import psycopg
import psycopg_pool

import lines
import orders

options = {'prepare_threshold': None} if 'POOLER' in os.environ else {}
with psycopg_pool.ConnectionPool('', min_size=1, max_size=1, kwargs=options) as pool:
    lines.serve(f'psycopg {psycopg.__version__}, ConnectionPool', pool.connection, psycopg.Error, orders)
