// The programs of docs/queues.md, with node-postgres, graphile-worker or pg-boss.  Prints
// facts: a line each, a name, a tab and a value.  CODE is the page's code.
const path = require('path');
const { Pool } = require('pg');
const kind = process.argv[2];
const pool = new Pool({ max: 20 }).on('error', console.error);
const fact = (name, value) => console.log(`${name}\t${value}`);
const query = (...arguments_) => pool.query(...arguments_);
const version = (name) => {
  const file = require.resolve(name);
  return `${name} ${require(`${file.slice(0, file.lastIndexOf(`${path.sep}${name}${path.sep}`))}/${name}/package.json`).version}`;
};
const until = async (condition) => {
  while (!await condition()) await new Promise((resolve) => setTimeout(resolve, 20));
};

// What has run: the tenants in order, and how many of each run, and did at most.
const runs = [], running = {}, most = {};
let putOffs = 0, failing = -1, begun;
async function run({ tenant, n }) {
  runs.push({ tenant, n, at: performance.now() });
  running[tenant] = (running[tenant] ?? 0) + 1;
  most[tenant] = Math.max(most[tenant] ?? 0, running[tenant]);
  await new Promise((resolve) => setTimeout(resolve, 50));
  running[tenant] -= 1;
  if (n === failing) {
    failing = -1;
    throw new Error('a job fails');
  }
}
const send = run;
const page = new Function('require', 'query', 'send', `${process.env.CODE}\nreturn { during, work, pace, reserved, ${kind === 'plain' ? '' : 'mail'} }`)(require, query, send);

// Each has add(), which adds a job, left(), the number of jobs that have not ended, and end().
const queues = {
  async plain() {
    const workers = [];
    return {
      version: version('pg'),
      add: (payload) => query('INSERT INTO jobs (payload) VALUES ($1)', [payload]),
      start: () => {
        for (let i = 0; i < 8; i += 1) workers.push(page.work((...arguments_) => (pool.ending ? new Promise(() => {}) : query(...arguments_)), run));
      },
      left: 'SELECT count(*)::int AS n FROM jobs',
      again: () => query("UPDATE jobs SET run_at = least(run_at, now() + interval '1 s')"),
      async end() {},
    };
  },
  async graphile() {
    const { runMigrations, run: start, makeWorkerUtils, Logger } = require('graphile-worker');
    const logger = new Logger(() => (level, message) => {
      if (/put off/.test(message)) putOffs += 1;
    });
    await runMigrations({ pgPool: pool, logger });
    await query(process.env.SQL);
    const utils = await makeWorkerUtils({ pgPool: pool, logger });
    const attempts = [];
    let runner;
    return {
      version: version('graphile-worker'),
      attempts,
      add: (payload) => utils.addJob('mail', payload),
      async start() {
        const mail = async (payload, helpers) => {
          await page.mail(payload, helpers);
          attempts.push(helpers.job.attempts);
        };
        runner = await start({ pgPool: pool, logger, concurrency: 8, pollInterval: 100, noHandleSignals: true, taskList: { mail } });
      },
      left: 'SELECT count(*)::int AS n FROM graphile_worker._private_jobs',
      async end() {
        await runner.stop();
        await utils.release();
      },
    };
  },
  async boss() {
    const PgBoss = require('pg-boss');
    const boss = new PgBoss({ max: 8 });
    const attempts = [];
    boss.on('error', (error) => fact('error', error.message));
    await boss.start();
    await boss.createQueue('earlier');
    await query(process.env.SQL);
    await boss.createQueue('mail');
    const putOff = async (job) => (await query("SELECT state <> 'active' AS yes FROM pgboss.job WHERE id = $1", [job.id])).rows[0].yes;
    return {
      version: version('pg-boss'),
      attempts,
      add: (payload, n) => boss.send(n % 2 && payload.tenant === 'full' ? 'earlier' : 'mail', payload, { retryLimit: 1 }),
      async start() {
        for (let i = 0; i < 16; i += 1) {
          await boss.work('mail', { includeMetadata: true, pollingIntervalSeconds: 0.5 }, async (jobs) => {
            await page.mail(jobs);
            if (await putOff(jobs[0])) putOffs += 1;
            else attempts.push(jobs[0].retryCount + 1);
          });
        }
      },
      left: "SELECT count(*)::int AS n FROM pgboss.job WHERE name = 'mail' AND state < 'completed'",
      async end() {
        await boss.stop({ graceful: false });
      },
    };
  },
};

async function main() {
  const queue = await queues[kind]();
  fact('version', queue.version);

  // The 101st job of a tenant is refused.
  if (kind !== 'plain') {
    let added = 0, code = 'none';
    try {
      for (; added < 110; added += 1) await queue.add({ tenant: 'full' }, added);
    } catch (error) {
      code = error.code;
    }
    fact('added', `${added} ${code}`);
    await query(kind === 'boss' ? 'DELETE FROM pgboss.job' : 'DELETE FROM graphile_worker._private_jobs');
  }

  // One tenant has 31 jobs, 20 have one.  One job of the former fails once.  Its quota to add jobs is used up.
  for (let n = 1; n <= 31; n += 1) await queue.add({ tenant: 'many', n }, n);
  for (let n = 1; n <= 20; n += 1) await queue.add({ tenant: `few${n}`, n: 0 }, n);
  if (kind !== 'plain') await query("SELECT rl_check('add:many', '100/1h', 69)");
  failing = 5;
  begun = performance.now();
  await queue.start();
  await until(async () => {
    if (queue.again && runs.some((job) => job.n === 5)) await queue.again();
    return (await query(queue.left)).rows[0].n === 0;
  });
  const many = runs.filter((job) => job.tenant === 'many');
  fact('runs of many', many.length);
  fact('different jobs', new Set(many.map((job) => job.n)).size);
  fact('other runs', runs.length - many.length);
  fact('most at a time', Math.max(...Object.values(most)));
  // The 31st start of a sliding log of 10/1s is not before the end of three seconds.
  fact('at the pace', many[30].at - begun >= 3000);
  if (queue.attempts) {
    fact('put off', putOffs > 0);
    fact('attempts', [...new Set(queue.attempts)].sort().join(' '));
    fact('last attempts', queue.attempts.filter((attempt) => attempt > 1).length);
  }
  await until(async () => (await query(`SELECT bool_and(remaining = 3) AS free FROM rl_peek('job:many', 'concurrent 3/1min', 0)`)).rows[0].free);
  fact('units', 'free');

  const from = performance.now();
  await Promise.all(Array.from({ length: 11 }, () => page.pace(query)));
  fact('eleven calls', performance.now() - from >= 200);
  await queue.end();
  process.exit(0);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
