// Rates over time: what the daemon remembers, continued by what arrives live.
//
// In: answers of /api/history, and samples. Out: columns of equal length for charts. Always holds: nothing older than the
// span, and a bounded number of columns and samples.

import type { Directions, HistoryAnswer, Rates, Values } from "./types.ts";

/** Columns of a set. A machine has a few links; without a bound, names that come and go would grow the set for ever. */
const MAX_COLUMNS = 64;

export interface Column {
  key: string;
  down: Values;
  up: Values;
}

export class RateSeries {
  /** Unix time of the samples (s), ascending. */
  times: number[] = [];
  columns: Column[] = [];
  private readonly spanSeconds: number;

  constructor(spanSeconds: number) {
    this.spanSeconds = spanSeconds;
  }

  /** Replaces all samples by those of an answer; only `keys` if given. */
  load(answer: Pick<HistoryAnswer, "begin_ms" | "step_ms">, of: Record<string, Directions>): void {
    const entries = Object.entries(of).slice(0, MAX_COLUMNS);
    const length = Math.max(0, ...entries.map(([, values]) => values.down_bps.length));
    this.times = Array.from({ length }, (_, i) => (answer.begin_ms + (i + 1) * answer.step_ms) / 1000);
    this.columns = entries.map(([key, values]) => ({
      key,
      down: padded(values.down_bps, length),
      up: padded(values.up_bps, length),
    }));
  }

  /** Adds a sample of this moment (unix time, s). Columns without a value in it are unknown there. */
  push(time: number, samples: ReadonlyMap<string, Rates>): void {
    const last = this.times.at(-1);
    if (last !== undefined && time <= last) return;
    for (const key of samples.keys()) {
      if (this.columns.length >= MAX_COLUMNS) break;
      if (!this.columns.some((column) => column.key === key)) {
        const unknown = () => new Array<number | null>(this.times.length).fill(null);
        this.columns.push({ key, down: unknown(), up: unknown() });
      }
    }
    this.times.push(time);
    for (const column of this.columns) {
      const rates = samples.get(column.key);
      column.down.push(rates?.down_bps ?? null);
      column.up.push(rates?.up_bps ?? null);
    }
    this.dropBefore(time - this.spanSeconds);
  }

  private dropBefore(time: number): void {
    const first = this.times.findIndex((at) => at >= time);
    if (first <= 0) return;
    this.times.splice(0, first);
    for (const column of this.columns) {
      column.down.splice(0, first);
      column.up.splice(0, first);
    }
    this.columns = this.columns.filter((column) => column.down.some((value) => value !== null));
  }
}

/** Those of the history that carried anything: links that are never used would only fill the legend. */
export function withTraffic<Series extends Directions>(of: Record<string, Series>): Record<string, Series> {
  const carried = (values: Values) => values.some((value) => (value ?? 0) > 0);
  return Object.fromEntries(
    Object.entries(of).filter(([, { down_bps, up_bps }]) => carried(down_bps) || carried(up_bps)),
  );
}

function padded(values: Values, length: number): Values {
  const missing = Math.max(0, length - values.length);
  return [...new Array<number | null>(missing).fill(null), ...values];
}

/** Sums of the first 1, 2, … lists at each place: unknown where no list has a value, else unknown values count as 0. */
export function stack(lists: readonly Values[]): Values[] {
  const length = lists[0]?.length ?? 0;
  const known = Array.from({ length }, (_, i) => lists.some((list) => (list[i] ?? null) !== null));
  const sums = new Array<number>(length).fill(0);
  return lists.map((list) =>
    known.map((isKnown, i) => {
      const sum = (sums[i] ?? 0) + (list[i] ?? 0);
      sums[i] = sum;
      return isKnown ? sum : null;
    }),
  );
}

export interface Interval {
  begin: number;
  end: number;
  /** Means of the columns, `null` where nothing is known. */
  down: Values;
  up: Values;
}

/** Means of `count` equal intervals of the span that ends at `end` (s), the newest first: the chart as a table. */
export function intervals(series: RateSeries, end: number, spanSeconds: number, count: number): Interval[] {
  const step = spanSeconds / count;
  return Array.from({ length: count }, (_, i) => {
    const to = end - i * step;
    const from = to - step;
    const inside = series.times.flatMap((time, at) => (time > from && time <= to ? [at] : []));
    return {
      begin: from,
      end: to,
      down: series.columns.map((column) => mean(column.down, inside)),
      up: series.columns.map((column) => mean(column.up, inside)),
    };
  });
}

function mean(values: Values, places: readonly number[]): number | null {
  const known = places.map((place) => values[place] ?? null).filter((value) => value !== null);
  return known.length === 0 ? null : known.reduce((sum, value) => sum + value, 0) / known.length;
}
