package com.google.common.util.concurrent;

import java.util.StringJoiner;

/** Prints how long acquire sleeps, in milliseconds, by a clock of its own: see node.js. */
class Guava {
    static long micros;

    static RateLimiter create(long idle) {
        RateLimiter limiter = RateLimiter.create(10, new RateLimiter.SleepingStopwatch() {
            protected long readMicros() { return micros; }

            protected void sleepMicrosUninterruptibly(long wait) { micros += wait; }
        });
        micros += idle;
        return limiter;
    }

    static void print(String name, RateLimiter limiter, int... permits) {
        StringJoiner waits = new StringJoiner(" ");
        for (int n : permits) {
            waits.add(String.valueOf(Math.round(limiter.acquire(n) * 1000)));
        }
        System.out.println(name + "\t" + waits);
    }

    public static void main(String[] arguments) {
        print("guava busy", create(0), 1, 1, 1, 1, 1);
        print("guava lends", create(0), 100, 1);
        print("guava after a pause", create(5_000_000), 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1);
    }
}
