# Each Python driver of the page in FastAPI: what a client gets for a refused order, for a
# refused rl_enforce, for a faulty statement, and for an order while Redis is away.
import asyncio
import os

import asyncpg
import psycopg
import psycopg2
import sqlalchemy
from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

import example

ADDRESS = '{PGHOST}:{PGPORT}/{PGDATABASE}'.format(**os.environ)


def of_driver(module):
    async def connect(user):
        connection = module.connect(f'postgresql://{user}@{ADDRESS}')
        connection.autocommit = True

        async def run(sql):
            connection.cursor().execute(sql)
        return run
    return connect


async def of_asyncpg(user):
    return (await asyncpg.connect(f'postgresql://{user}@{ADDRESS}')).execute


async def of_sqlalchemy(user):
    engine = sqlalchemy.create_engine(f'postgresql+psycopg2://{user}@{ADDRESS}')

    async def run(sql):
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text(sql))
    return run


async def of_sqlalchemy_asyncpg(user):
    engine = create_async_engine(f'postgresql+asyncpg://{user}@{ADDRESS}')

    async def run(sql):
        async with engine.begin() as connection:
            await connection.execute(sqlalchemy.text(sql))
    return run


async def answer(error_class, run, sql):
    """Returns the status and Retry-After of a request that runs the statement."""
    sent = {}
    application = FastAPI()
    application.add_exception_handler(error_class, example.too_many)

    async def serve():
        await run(sql)
    application.add_api_route('/', serve, status_code=201)

    async def send(message):
        sent.update(message)

    async def receive():
        return {'type': 'http.request', 'body': b'', 'more_body': False}
    try:
        await application({'type': 'http', 'method': 'GET', 'path': '/', 'query_string': b'', 'headers': [], 'root_path': ''},
                          receive, send)
    except Exception:
        pass  # FastAPI has answered with 500
    return ' '.join([str(sent['status'])] + [value.decode() for name, value in sent['headers'] if name == b'retry-after'])


async def main():
    who = int(os.environ['CUSTOMER'])
    for name, error_class, connect in (
            ('psycopg2', psycopg2.Error, of_driver(psycopg2)), ('psycopg', psycopg.Error, of_driver(psycopg)),
            ('asyncpg', asyncpg.PostgresError, of_asyncpg), ('SQLAlchemy over psycopg2', DBAPIError, of_sqlalchemy),
            ('SQLAlchemy over asyncpg', DBAPIError, of_sqlalchemy_asyncpg)):
        who += 1
        run, away = await connect('app'), await connect('app_away')
        order = f'INSERT INTO orders (customer) VALUES ({who})'
        enforce = f"SELECT ratelimit.rl_enforce('enforced:{who}', '1/1h')"
        seen = [await answer(error_class, run, sql) for sql in [order] * 6 + [enforce] * 2 + ['SELECT 1 / 0']]
        print(name, ', '.join(seen + [await answer(error_class, away, order)]), sep='\t', flush=True)


asyncio.new_event_loop().run_until_complete(main())
