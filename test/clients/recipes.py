# The asyncio programs of docs/recipes.md, with asyncpg.  Prints facts: a line each, a name, a
# tab and a value.
import asyncio
import os

import asyncpg

import tokens
import exports

TOKENS = "SELECT remaining FROM rl_peek('tokens:ada', 'fixed_window 1000000/month in Europe/Berlin', 0)"
HELD = "SELECT coalesce(sum(used), 0)::int FROM rl_inspect('exports') WHERE state LIKE 'concurrent%'"
BEAT = 5  # seconds; also the longest time of a call


def fact(name, value):
    print(name, value, sep='\t', flush=True)


async def until(condition):
    while not await condition():
        await asyncio.sleep(0.01)


class Work:
    """Work that ends when it is told to."""

    def __init__(self, after=None):
        self.begun = self.cancelled = 0
        self.end = asyncio.Event()
        self.after = after

    async def __call__(self, *_):
        self.begun += 1
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.after, Exception):
            raise self.after
        return self.after


def works(*all):
    """Returns a condition: all have begun."""
    async def condition():
        return min(work.begun for work in all) > 0
    return condition


async def answers(pool, watcher):
    model = Work(('an answer', 1234))
    running = [asyncio.create_task(tokens.answer(pool, 'ada', 'a prompt', model)) for _ in range(20)]

    async def all_ask():
        return model.begun == 20
    await until(all_ask)
    fact('answers', '20 at a time over one connection')
    fact('open transactions', await watcher.fetchval("SELECT count(*) FROM pg_stat_activity WHERE usename = 'app' AND xact_start IS NOT NULL"))
    fact('reserved', 1000000 - await watcher.fetchval(TOKENS))
    model.end.set()
    fact('returned', ' '.join(sorted({await task for task in running})))
    fact('used', 1000000 - await watcher.fetchval(TOKENS))

    failing = Work(ValueError('no model'))
    failing.end.set()
    try:
        await tokens.answer(pool, 'ada', 'a prompt', failing)
    except ValueError as error:
        fact('error', error)
    cancelled = Work()
    task = asyncio.create_task(tokens.answer(pool, 'ada', 'a prompt', cancelled))
    await until(works(cancelled))
    task.cancel()
    await asyncio.wait({task})
    fact('used after failures', 1000000 - await watcher.fetchval(TOKENS))

    none = Work()
    await watcher.fetchval("SELECT rl_allow('tokens:ada', 'fixed_window 1000000/month in Europe/Berlin', 970000)")
    fact('refused', f"{await tokens.answer(pool, 'ada', 'a' * 30000, none)} {none.begun}")


async def run_exports(pool, watcher):
    work = {job: Work() for job in 'abc'}
    running = {job: asyncio.create_task(exports.export(pool, job, work[job], BEAT)) for job in work}
    await until(works(*work.values()))
    fourth = Work()
    again = Work()
    fact('fourth', f"{await exports.export(pool, 'd', fourth, BEAT)} {fourth.begun}")
    fact('same job', f"{await exports.export(pool, 'a', again, BEAT)} {again.begun}")

    first = await watcher.fetchval("SELECT max(until) FROM rl_inspect('exports')")

    async def renewed():
        return await watcher.fetchval("SELECT min(until) > $1::timestamptz + interval '1 s' FROM rl_inspect('exports') WHERE raw = 'open'", first)
    await until(renewed)
    fact('fourth later', f"{await exports.export(pool, 'd', fourth, BEAT)} {fourth.begun}")
    for job in work:
        work[job].end.set()
    fact('ended', ' '.join([str(await running[job]) for job in running]))
    fact('job that has ended', f"{await exports.export(pool, 'a', again, BEAT)} {again.begun}")
    fact('held', await watcher.fetchval(HELD))

    failing = Work(ValueError('no disk'))
    failing.end.set()
    try:
        await exports.export(pool, 'e', failing, BEAT)
    except ValueError as error:
        fact('export fails', error)
    fact('held then', await watcher.fetchval(HELD))

    for name, statement in (('unit lost', "SELECT rl_reset('exports')"), ('outage', "ALTER SYSTEM SET ratelimit.redis_url = 'redis://127.0.0.1:1'")):
        work = Work()
        task = asyncio.create_task(exports.export(pool, name, work, BEAT))
        await until(works(work))
        await watcher.execute(statement)
        await watcher.execute('SELECT pg_reload_conf()')
        try:
            end = await task
        except asyncpg.PostgresError as error:
            end = error.sqlstate
        fact(name, f'{end} {work.cancelled}')


async def main():
    async with asyncpg.create_pool(min_size=1, max_size=1, user='app') as pool:
        watcher = await asyncpg.connect(user=os.environ['WATCHER'])
        await answers(pool, watcher)
        await run_exports(pool, watcher)
        await watcher.close()


asyncio.run(asyncio.wait_for(main(), 100))
