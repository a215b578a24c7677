// Each driver of the page in Express and Fastify: what a client gets for a refused order, for
// a refused rl_enforce, for a faulty statement, and for an order while Redis is away.
const express = require('express');
const fastify = require('fastify');
const { tooMany, tooManyReply } = require(process.env.EXAMPLE);

const { PGHOST: host, PGPORT, PGDATABASE: database } = process.env;
let customer = Number(process.env.CUSTOMER);

// Each has order(), which inserts by the driver's own means, query(), and end().
const drivers = {
  'node-postgres'(options) {
    const pool = new (require('pg').Pool)(options);
    const query = (text) => pool.query(text);
    return { query, order: (who) => pool.query('INSERT INTO orders (customer) VALUES ($1)', [who]), end: () => pool.end() };
  },
  'postgres.js'(options) {
    const sql = require('postgres')(options);
    return { query: (text) => sql.unsafe(text), order: (who) => sql`INSERT INTO orders (customer) VALUES (${who})`, end: () => sql.end() };
  },
  Knex(options) {
    const knex = require('knex')({ client: 'pg', connection: options, pool: { min: 0, max: 1 } });
    return { query: (text) => knex.raw(text), order: (who) => knex('orders').insert({ customer: who }), end: () => knex.destroy() };
  },
  Kysely(options) {
    const { Kysely, PostgresDialect, sql } = require('kysely');
    const db = new Kysely({ dialect: new PostgresDialect({ pool: new (require('pg').Pool)(options) }) });
    return { query: (text) => sql.raw(text).execute(db), order: (who) => db.insertInto('orders').values({ customer: who }).execute(),
      end: () => db.destroy() };
  },
  async TypeORM(options) {
    const { DataSource, EntitySchema } = require('typeorm');
    const Order = new EntitySchema({ name: 'Order', tableName: 'orders',
      columns: { id: { type: 'bigint', primary: true, generated: 'identity' }, customer: { type: 'int' } } });
    const db = await new DataSource({ ...options, type: 'postgres', username: options.user, entities: [Order] }).initialize();
    return { query: (text) => db.query(text), order: (who) => db.getRepository(Order).insert({ customer: who }), end: () => db.destroy() };
  },
  Sequelize(options) {
    const { Sequelize, DataTypes } = require('sequelize');
    const db = new Sequelize(database, options.user, '', { ...options, dialect: 'postgres', logging: false, pool: { max: 1 } });
    const Order = db.define('Order', { customer: DataTypes.INTEGER }, { tableName: 'orders', timestamps: false });
    return { query: (text) => db.query(text), order: (who) => Order.create({ customer: who }), end: () => db.close() };
  },
  Drizzle(options) {
    const { sql } = require('drizzle-orm');
    const { orders } = require(process.env.SCHEMA);
    const pool = new (require('pg').Pool)(options);
    const db = require('drizzle-orm/node-postgres').drizzle(pool);
    return { query: (text) => db.execute(sql.raw(text)), order: (who) => db.insert(orders).values({ customer: who }), end: () => pool.end() };
  },
  Prisma(options) {
    const { PrismaPg } = require('@prisma/adapter-pg');
    const prisma = new (require(process.env.PRISMA_CLIENT).PrismaClient)({ adapter: new PrismaPg(options) });
    return { query: (text) => prisma.$queryRawUnsafe(text), order: (who) => prisma.orders.create({ data: { customer: who } }),
      end: () => prisma.$disconnect() };
  },
};

// Each returns the URL of a server that answers a request by act(), and its end.
const frameworks = {
  async Express(act) {
    const app = express();
    app.get('/', async (request, response) => { await act(); response.status(201).end(); });
    app.use(tooMany);
    app.use((error, request, response, next) => response.status(500).end()); // eslint-disable-line no-unused-vars
    const server = app.listen(0, '127.0.0.1');
    await new Promise((resume) => server.on('listening', resume));
    return { url: `http://127.0.0.1:${server.address().port}/`, end: () => { server.closeAllConnections(); server.close(); } };
  },
  async Fastify(act) {
    const app = fastify({ forceCloseConnections: true });
    app.setErrorHandler(tooManyReply);
    app.get('/', async (request, reply) => { await act(); return reply.code(201).send(); });
    return { url: await app.listen({ port: 0, host: '127.0.0.1' }), end: () => app.close() };
  },
};

(async () => {
  for (const name of Object.keys(drivers)) {
    const options = { host, port: Number(PGPORT), database, max: 1 };
    const db = await drivers[name]({ ...options, user: 'app' });
    const away = await drivers[name]({ ...options, user: 'app_away' });
    for (const framework of Object.keys(frameworks)) {
      const who = ++customer;
      const key = `ratelimit.rl_enforce('enforced:${who}', '1/1h')`;
      const steps = [...Array.from({ length: 6 }, () => () => db.order(who)), () => db.query(`SELECT ${key} IS NULL`),
        () => db.query(`SELECT ${key} IS NULL`), () => db.query('SELECT 1 / 0'), () => away.order(who)];
      const seen = [];
      let step;
      const server = await frameworks[framework](() => step());
      for (step of steps) {
        const { status, headers } = await fetch(server.url);
        seen.push([status, headers.get('retry-after')].filter(Boolean).join(' '));
      }
      await server.end();
      console.log(`${name} in ${framework}\t${seen.join(', ')}`);
    }
    await db.end();
    await away.end();
  }
})();
