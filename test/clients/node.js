// node-postgres with its Pool.
const readline = require('readline');
const { Pool } = require('pg');
const { version } = require('pg/package.json');
const { placeOrder, retryAfter } = require(process.env.EXAMPLE);

// By default, Pool closes a connection that was idle for 10 s.
const pool = new Pool({ max: 1, idleTimeoutMillis: 0 });
const convert = {
  i: Number,
  f: Number,
  s: String,
  a: (text) => text.split('|'),
  b: (text) => text.split('|').map(Number),
  t: (text) => new Date(text),
  n: () => null,
};

async function run(sql, params) {
  const client = await pool.connect();
  let pid;
  try {
    pid = (await client.query('SELECT pg_backend_pid() AS pid')).rows[0].pid;
    let n = 0;
    const text = sql.replace(/\?/g, () => `$${++n}`);
    const { rows } = await client.query({ text, values: params, rowMode: 'array' });
    const columns = (rows[0] ?? []).map((value) => `${value === null ? 'null' : typeof value}:${value}`);
    return [pid, 'ok', ...columns];
  } catch (error) {
    error.pid = pid;
    throw error;
  } finally {
    client.release();
  }
}

async function answer(line) {
  const [sql, ...params] = line.split('\t');
  const values = params.map((param) => convert[param[0]](param.slice(2)));
  try {
    if (sql === 'version') return ['', 'ok', `node pg ${version}, Pool`];
    if (sql === 'pool.query') return ['', 'ok', await pool.query(...values)];
    if (sql === 'place_order') return ['', 'ok', await placeOrder(pool, ...values)];
    return await run(sql, values);
  } catch (error) {
    return [error.pid, 'error', error.constructor.name, error.code, retryAfter(error), error.message,
      error.detail, error.hint, error.schema, error.table, error.constraint];
  }
}

(async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const fields = await answer(line);
    console.log(fields.map((field) => String(field ?? '').replace(/\n/g, '\\n')).join('\t'));
  }
  await pool.end();
})();
