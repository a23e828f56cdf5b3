import assert from "node:assert/strict";
import { test } from "node:test";
import {
  formatBytes,
  formatDuration,
  formatMilliseconds,
  formatRate,
  formatRtt,
  formatTick,
  rateOption,
  sizeOption,
} from "../src/format.ts";

test("rates and sizes have the unit in which they are short, as on the command line", () => {
  assert.equal(formatRate(0), "0 bit/s");
  assert.equal(formatRate(999), "999 bit/s");
  assert.equal(formatRate(93_240_000), "93.2 Mbit/s");
  assert.equal(formatRate(2_310_000_000), "2.3 Gbit/s");
  assert.equal(formatBytes(1536), "1.5 KiB");
  assert.equal(formatBytes(2 ** 50), "1024.0 TiB");
});

test("a rate is never rounded up to 1000 of its unit", () => {
  assert.equal(formatRate(999_960), "1.0 Mbit/s");
  assert.equal(formatRate(999_940), "999.9 kbit/s");
});

test("unknown and impossible values do not look like measured ones", () => {
  assert.equal(formatRate(undefined), "–");
  assert.equal(formatRate(null), "–");
  assert.equal(formatRtt(undefined), "–");
  assert.equal(formatRate(Number.NaN), "0 bit/s");
  assert.equal(formatDuration(Number.POSITIVE_INFINITY), "0 s");
});

test("ticks of an axis are short", () => {
  assert.deepEqual([0, 500, 50_000, 80_000_000, 1_500_000_000].map(formatTick), [
    "0",
    "500",
    "50 k",
    "80 M",
    "1.5 G",
  ]);
});

test("durations have two units", () => {
  assert.deepEqual([5.9, 61, 3661, 90_061].map(formatDuration), ["5 s", "1 min 1 s", "1 h 1 min", "1 d 1 h"]);
  assert.deepEqual([71.4, 3210, 61_000].map(formatMilliseconds), ["71 ms", "3.2 s", "1 min 1 s"]);
});

test("limits are written as options take them", () => {
  assert.deepEqual([undefined, 20_000_000, 1_500_000, 64_000, 2e9].map(rateOption), [
    "none",
    "20mbit",
    "1.5mbit",
    "64kbit",
    "2gbit",
  ]);
  assert.deepEqual([null, 50e9, 1.5e6, 2e12].map(sizeOption), ["none", "50GB", "1.5MB", "2TB"]);
});
