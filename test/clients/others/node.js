// rate-limiter-flexible, express-rate-limit and @upstash/ratelimit at the times of SHORT, or of the page's
// PAGE, in milliseconds.  Prints a line for each: a name, a tab, and 1 for each action that is allowed,
// otherwise 0.
const [times, page] = [process.env.SHORT, process.env.PAGE].map((list) => list.split(' ').map(Number));
const RealDate = Date;
let now = 0;
globalThis.Date = class extends RealDate {
  constructor(...given) {
    super(...(given.length ? given : [now]));
  }
  static now() {
    return now;
  }
};

async function print(name, allows, at = times) {
  let bits = '';
  for (const [n, time] of at.entries()) {
    now = time;
    bits += await allows(n) ? '1' : '0';
  }
  process.stdout.write(`${name}\t${bits}\n`);
}

async function flexible() {
  const { RateLimiterMemory } = require('rate-limiter-flexible');
  const limiter = (options) => {
    const memory = new RateLimiterMemory(options);
    return (n) => memory.consume('k', options.most ? 1 + n % options.most : 1).then(() => true, (error) => {
      if (error instanceof Error) throw error;
      return false;
    });
  };
  await print('flexible', limiter({ points: 5, duration: 1 }));
  await print('flexible blocks', limiter({ points: 2, duration: 1, blockDuration: 2 }));
  await print('flexible costs', limiter({ points: 5, duration: 1, most: 3 }));
  await print('flexible page', limiter({ points: 5, duration: 1 }), page);
  await print('flexible page blocks', limiter({ points: 2, duration: 1, blockDuration: 1 }), page);

  const counter = new RateLimiterMemory({ points: 5, duration: 1 });
  const results = [];
  for (now of times) {
    const [allowed, result] = await counter.consume('k').then((of) => [1, of], (of) => [0, of]);
    results.push(`${allowed} ${result.remainingPoints} ${result.msBeforeNext} ${allowed ? result.consumedPoints : 5}`);
  }
  process.stdout.write(`flexible results\t${results.join(' ')}\n`);

  const five = new RateLimiterMemory({ points: 5, duration: 60 });
  const consume = (count) => () => five.consume('k', count).then(() => '1', () => '0');
  let bits = '';
  for (const step of [() => five.penalty('k', 3), consume(1), consume(2), () => five.delete('k'), consume(4), () => five.reward('k', 3),
    consume(4), consume(1), () => five.delete('k'), consume(1), () => five.block('k', 10), consume(1), () => { now += 9000; }, consume(1),
    () => { now += 2000; }, consume(1)]) {
    const answer = await step();
    bits += typeof answer === 'string' ? answer : '';
  }
  process.stdout.write(`flexible calls\t${bits}\n`);
}

async function express() {
  const { rateLimit } = require('express-rate-limit');
  for (const [name, at] of [['express', times], ['express page', page]]) {
    const limiter = rateLimit({ windowMs: 1000, limit: 5, keyGenerator: () => 'k', validate: false });
    await print(name, () => new Promise((resolve) => {
      const response = { setHeader: () => {}, status: () => response, send: () => resolve(false) };
      limiter({ headers: {}, app: { get: () => {} } }, response, () => resolve(true));
    }), at);
  }
}

async function upstash() {
  const { Ratelimit } = require('@upstash/ratelimit');
  const Redis = require('ioredis');
  const client = new Redis(process.env.REDIS_SOCKET);
  // Upstash's own client speaks HTTP to its service, whose scripts begin with a flag that Redis lacks.
  const redis = {
    eval: (script, keys, args) => client.eval(script.replace(/^#!.*/, ''), keys.length, ...keys, ...args),
    evalsha: (sha, keys, args) => client.evalsha(sha, keys.length, ...keys, ...args),
  };
  const limiter = (prefix, algorithm) => {
    const limit = new Ratelimit({ redis, prefix, limiter: algorithm, ephemeralCache: false });
    return async () => (await limit.limit('k')).success;
  };
  await print('upstash fixed', limiter('fixed', Ratelimit.fixedWindow(5, '1 s')));
  await print('upstash bucket', limiter('bucket', Ratelimit.tokenBucket(2, '1 s', 5)));
  await print('upstash sliding', limiter('sliding', Ratelimit.slidingWindow(5, '1 s')));
  client.disconnect();
}

flexible().then(express).then(upstash).then(() => process.exit());
