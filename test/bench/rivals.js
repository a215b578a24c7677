// For rivals.bash: clients that insert orders through one pool of connections, and ask
// rate-limiter-flexible before.  With seconds=, the time of each order goes to the file log=,
// which looks like a log of pgbench.  With tries=, each client tries that often.
'use strict';

const { writeFileSync } = require('fs');
const { setTimeout: sleep } = require('timers/promises');
const { Pool } = require('pg');
const Redis = require('ioredis');
const { RateLimiterPostgres, RateLimiterRedis, RateLimiterRes } = require('rate-limiter-flexible');

const arg = Object.fromEntries(process.argv.slice(2).map(word => word.split('=')));
const [clients, first, last, tries, pause] = ['clients', 'first', 'last', 'tries', 'pause'].map(name => Number(arg[name]));
const options = { points: Number(arg.limit), duration: 86400 };
const pool = new Pool({ max: clients });
let limiter;

async function order() {
	const customer = first + Math.floor(Math.random() * (last - first + 1));

	try {
		if (limiter)
			await limiter.consume(customer);
		await pool.query({ name: 'order', text: 'INSERT INTO orders (customer) VALUES ($1)', values: [customer] });
	} catch (error) {
		if (!(error instanceof RateLimiterRes) && error.code !== 'PT429')
			throw error;
	}
}

const together = client => Promise.all(Array.from({ length: clients }, client));

// Lets each client order while "more" of its orders is true.  Returns the microseconds of each order.
async function load(more) {
	const times = [];

	await together(async () => {
		for (let i = 0; more(i); i++) {
			const began = performance.now();

			await order();
			times.push((performance.now() - began) * 1000);
			if (pause)
				await sleep(pause);
		}
	});
	return times;
}

async function main() {
	if (arg.limiter === 'redis') {
		limiter = new RateLimiterRedis({ ...options, storeClient: new Redis({ path: arg.redis }) });
	} else if (arg.limiter === 'postgres') {
		await new Promise((resolve, reject) => {
			limiter = new RateLimiterPostgres({ ...options, storeClient: pool }, error => error ? reject(error) : resolve());
		});
	}
	// Opens all connections of the pool.
	await together(() => pool.query('SELECT pg_sleep(0.1)'));
	if (tries) {
		await load(i => i < tries);
		return;
	}
	// The first orders wait for the compiler.
	const begin = performance.now() + 500;
	await load(() => performance.now() < begin);
	const began = performance.now();
	const times = await load(() => performance.now() < began + 1000 * arg.seconds);
	console.log(`tps = ${times.length / (performance.now() - began) * 1000}`);
	writeFileSync(arg.log, times.map(us => `0 0 ${us.toFixed(0)}\n`).join(''));
}

main().then(() => process.exit(0), error => {
	console.error(error);
	process.exit(1);
});
