# SQLAlchemy with asyncpg, and the handler in a Starlette application.
import asyncio
import os

import asyncpg
import sqlalchemy
from sqlalchemy import BigInteger, Column, Integer, insert, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import declarative_base
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

import example
from facts import fact, facts_of, state_of

Base = declarative_base()


class Order(Base):
    __tablename__ = 'orders'
    id = Column(BigInteger, primary_key=True)
    customer = Column(Integer)


loop = asyncio.new_event_loop()
wait = loop.run_until_complete
engine = create_async_engine('postgresql+asyncpg://{PGUSER}@{PGHOST}:{PGPORT}/{PGDATABASE}'.format(**os.environ),
                             pool_size=1, max_overflow=0)


async def order(customer, rows):
    async with AsyncSession(engine) as session, session.begin():
        await session.execute(insert(Order).values([{'customer': customer}] * rows))


async def add_all(customer, rows):
    async with AsyncSession(engine) as session, session.begin():
        session.add_all([Order(customer=customer) for _ in range(rows)])


async def serve(request):
    await order(**request.path_params)
    return Response(status_code=201)


async def pid():
    async with engine.connect() as connection:
        return (await connection.execute(text('SELECT pg_backend_pid()'))).scalar()


async def answer(customer, rows):
    sent = {}
    application = Starlette(routes=[Route('/{customer:int}/{rows:int}', serve)])
    application.add_exception_handler(DBAPIError, example.too_many)

    async def send(message):
        sent.update(message)

    await application({'type': 'http', 'method': 'GET', 'path': f'/{customer}/{rows}', 'headers': []}, None, send)
    return f"{sent['status']} {dict(sent['headers']).get(b'retry-after', b'').decode()}"


fact('version', f'SQLAlchemy {sqlalchemy.__version__}, asyncpg {asyncpg.__version__}')
facts_of(lambda *order_of: wait(order(*order_of)), lambda *order_of: wait(answer(*order_of)), lambda: wait(pid()))
for attempt in 'batch', 'batch again':
    fact(attempt, state_of(lambda: wait(add_all(int(os.environ['CUSTOMER']) + 4, 6))))
