// Sequelize, Drizzle or Prisma, and the handler in a server of Node.
const http = require('http');
const path = require('path');
const { tooMany } = require(process.env.EXAMPLE);

const first = Number(process.env.CUSTOMER);
const options = { host: process.env.PGHOST, port: Number(process.env.PGPORT), user: process.env.PGUSER, database: process.env.PGDATABASE };
const fact = (name, value) => console.log(`${name}\t${value}`);
const rowsOf = (customer, rows) => Array.from({ length: rows }, () => ({ customer }));

// Each has order(), which inserts rows by one statement, the same in a transaction, the id of the backend, and end().
const frameworks = {
  Sequelize() {
    const { Sequelize, DataTypes, version } = require('sequelize');
    const sequelize = new Sequelize(options.database, options.user, '', { ...options, dialect: 'postgres', logging: false, pool: { max: 1 } });
    const Order = sequelize.define('Order', { customer: DataTypes.INTEGER }, { tableName: 'orders', timestamps: false });
    return {
      version: `Sequelize ${version}`,
      order: (customer, rows) => Order.bulkCreate(rowsOf(customer, rows)),
      inTransaction: (customer, rows) => sequelize.transaction((transaction) => Order.bulkCreate(rowsOf(customer, rows), { transaction })),
      async others() {
        await sequelize.sync({ force: true });
        await sequelize.getQueryInterface().sequelize.query(process.env.TRIGGER);
        const triggers = `SELECT count(*)::int AS n FROM pg_trigger WHERE tgname = 'limit_orders'`;
        const counts = [(await sequelize.query(triggers))[0][0].n];
        await sequelize.sync({ force: true });
        fact('triggers before and after sync', [...counts, (await sequelize.query(triggers))[0][0].n]);
      },
      pid: async () => (await sequelize.query('SELECT pg_backend_pid() AS pid'))[0][0].pid,
      end: () => sequelize.close(),
    };
  },
  Drizzle() {
    const { drizzle } = require('drizzle-orm/node-postgres');
    const { sql } = require('drizzle-orm');
    const { orders } = require(process.env.SCHEMA);
    const pool = new (require('pg').Pool)({ ...options, max: 1 });
    const db = drizzle(pool);
    return {
      version: `Drizzle ${require(path.join(require.resolve('drizzle-orm'), '../package.json')).version}, node-postgres`,
      order: (customer, rows) => db.insert(orders).values(rowsOf(customer, rows)),
      inTransaction: (customer, rows) => db.transaction((tx) => tx.insert(orders).values(rowsOf(customer, rows))),
      pid: async () => (await db.execute(sql`SELECT pg_backend_pid() AS pid`)).rows[0].pid,
      end: () => pool.end(),
    };
  },
  Prisma() {
    const { PrismaPg } = require('@prisma/adapter-pg');
    const { PrismaClient } = require(process.env.PRISMA_CLIENT);
    const prisma = new PrismaClient({ adapter: new PrismaPg({ ...options, max: 1 }) });
    return {
      version: `Prisma ${require('@prisma/client/package.json').version}, adapter-pg`,
      order: (customer, rows) => prisma.orders.createMany({ data: rowsOf(customer, rows) }),
      inTransaction: (customer, rows) => prisma.$transaction((tx) => tx.orders.createMany({ data: rowsOf(customer, rows) })),
      pid: async () => (await prisma.$queryRaw`SELECT pg_backend_pid() AS pid`)[0].pid,
      end: () => prisma.$disconnect(),
    };
  },
};

const errorOf = async (attempt) => { try { await attempt(); return null; } catch (error) { return error; } };
// eslint-disable-next-line no-unused-vars
const stateOf = (error) => eval(process.env.STATE);
// eslint-disable-next-line no-unused-vars
const hintOf = (error) => eval(process.env.HINT);

async function answer(order, customer, rows) {
  let passedOn = '';
  const server = http.createServer((request, response) => {
    order(customer, rows).catch((error) => tooMany(error, request, response, (other) => {
      passedOn = stateOf(other);
      response.writeHead(500).end();
    }));
  });
  await new Promise((resume) => server.listen(0, '127.0.0.1', resume));
  const { status, headers } = await fetch(`http://127.0.0.1:${server.address().port}/`);
  server.close();
  server.closeAllConnections();
  return passedOn || `${status} ${headers.get('retry-after')}`;
}

(async () => {
  const { version, order, inTransaction, others, pid, end } = frameworks[process.argv[2]]();
  const kept = async (attempt) => {
    const before = await pid();
    await errorOf(attempt);
    return await pid() === before ? 'kept' : 'closed';
  };
  if (process.argv[3] === 'others') {
    await others();
    return end();
  }
  fact('version', version);
  await order(first, 5);
  const error = await errorOf(() => order(first, 1));
  fact('class', error.constructor.name);
  fact('state', stateOf(error));
  fact('code', error.code);
  fact('hint', hintOf(error));
  fact('answer', await answer(order, first, 1));
  fact('other answer', await answer(order, first + 1, 6));
  fact('rows', stateOf(await errorOf(() => order(first + 2, 6))));
  fact('then', stateOf(await errorOf(() => order(first + 2, 1))));
  fact('connection', await kept(() => order(first, 1)));
  fact('connection in a transaction', await kept(() => inTransaction(first, 1)));
  return end();
})();
