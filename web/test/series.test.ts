import assert from "node:assert/strict";
import { test } from "node:test";
import { intervals, RateSeries, stack } from "../src/series.ts";

const rates = (down_bps: number) => ({ down_bps, up_bps: 1 });

test("areas are stacked in order, and an unknown value beside known ones counts as 0", () => {
  assert.deepEqual(
    stack([
      [1, null, null],
      [10, 20, null],
    ]),
    [
      [1, 0, null],
      [11, 20, null],
    ],
  );
  assert.deepEqual(stack([]), []);
});

test("live samples continue the history", () => {
  const series = new RateSeries(300);
  series.load({ begin_ms: 1_000_000, step_ms: 1000 }, { eth0: { down_bps: [5, 6], up_bps: [1, 1] } });
  assert.deepEqual(series.times, [1001, 1002]);
  series.push(1002.5, new Map([["eth0", rates(7)]]));
  assert.deepEqual(series.columns[0], { key: "eth0", down: [5, 6, 7], up: [1, 1, 1] });
});

test("a sample that is not later than the last one is left out", () => {
  const series = new RateSeries(300);
  series.push(10, new Map([["eth0", rates(7)]]));
  series.push(10, new Map([["eth0", rates(8)]]));
  assert.deepEqual(series.columns[0]?.down, [7]);
});

test("a link that appears or is gone is unknown in the samples without it", () => {
  const series = new RateSeries(300);
  series.push(1, new Map([["eth0", rates(7)]]));
  series.push(2, new Map([["wwan0", rates(3)]]));
  assert.deepEqual(
    series.columns.map(({ key, down }) => [key, down]),
    [
      ["eth0", [7, null]],
      ["wwan0", [null, 3]],
    ],
  );
});

test("samples older than the span and columns without any are dropped", () => {
  const series = new RateSeries(10);
  series.push(1, new Map([["gone", rates(1)]]));
  for (let time = 2; time <= 30; time += 1) series.push(time, new Map([["eth0", rates(time)]]));
  assert.equal(series.times[0], 20);
  assert.deepEqual(
    series.columns.map(({ key, down }) => [key, down.length]),
    [["eth0", 11]],
  );
});

test("names that come and go do not grow the set", () => {
  const series = new RateSeries(1000);
  for (let time = 0; time < 500; time += 1) series.push(time, new Map([[`link${time}`, rates(1)]]));
  assert.ok(series.columns.length <= 64, `${series.columns.length} columns`);
});

test("lists of a history that are too short are aligned at their newest end", () => {
  const series = new RateSeries(300);
  series.load(
    { begin_ms: 0, step_ms: 1000 },
    { a: { down_bps: [1, 2, 3], up_bps: [1, 2, 3] }, b: { down_bps: [9], up_bps: [] } },
  );
  assert.deepEqual(series.columns[1], { key: "b", down: [null, null, 9], up: [null, null, null] });
});

test("the table has the means of equal intervals, the newest first", () => {
  const series = new RateSeries(300);
  for (const [time, rate] of [
    [1, 10],
    [2, 20],
    [3, 40],
  ] as const) {
    series.push(time, new Map([["eth0", rates(rate)]]));
  }
  const rows = intervals(series, 4, 4, 2);
  assert.deepEqual(
    rows.map(({ begin, end, down }) => [begin, end, down]),
    [
      [2, 4, [40]],
      [0, 2, [15]],
    ],
  );
  assert.deepEqual(intervals(series, 104, 100, 1)[0]?.down, [null]);
});
