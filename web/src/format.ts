// Values as texts, as the command line writes them.

function scaled(value: number, step: number, units: readonly string[]): string {
  let number = Number.isFinite(value) ? Math.max(0, value) : 0;
  let unit = 0;
  // 999.95 would be written as 1000.0.
  while (number >= step - 0.05 && unit < units.length - 1) {
    number /= step;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(number) : number.toFixed(1)} ${units[unit]}`;
}

/** A rate in bit/s, as in `93.2 Mbit/s`. */
export function formatRate(bitsPerSecond: number | undefined | null): string {
  if (bitsPerSecond === undefined || bitsPerSecond === null) return "–";
  return scaled(bitsPerSecond, 1000, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]);
}

/** A rate for an axis that names the unit, as in `80 M`. */
export function formatTick(bitsPerSecond: number): string {
  const prefixes = ["", " k", " M", " G", " T"];
  let number = bitsPerSecond;
  let prefix = 0;
  while (Math.abs(number) >= 1000 && prefix < prefixes.length - 1) {
    number /= 1000;
    prefix += 1;
  }
  return `${Number(number.toFixed(2))}${prefixes[prefix]}`;
}

/** An amount of data, as in `12.4 MiB`. */
export function formatBytes(bytes: number): string {
  return scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
}

/** A duration in two units, as in `2 h 3 min`. */
export function formatDuration(seconds: number): string {
  const whole = Number.isFinite(seconds) ? Math.max(0, Math.floor(seconds)) : 0;
  const days = Math.floor(whole / 86_400);
  const hours = Math.floor(whole / 3600) % 24;
  const minutes = Math.floor(whole / 60) % 60;
  if (days > 0) return `${days} d ${hours} h`;
  if (hours > 0) return `${hours} h ${minutes} min`;
  if (minutes > 0) return `${minutes} min ${whole % 60} s`;
  return `${whole} s`;
}

/** A short time: milliseconds up to a second, then seconds, then as a duration. */
export function formatMilliseconds(milliseconds: number): string {
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  if (milliseconds < 60_000) return `${(milliseconds / 1000).toFixed(1)} s`;
  return formatDuration(milliseconds / 1000);
}

/** A round-trip time in ms. */
export function formatRtt(milliseconds: number | undefined): string {
  return milliseconds === undefined ? "–" : `${milliseconds.toFixed(1)} ms`;
}

export function formatPercent(percent: number | undefined, digits = 1): string {
  return percent === undefined ? "–" : `${percent.toFixed(digits)} %`;
}

/** A rate as options take it, as in `20mbit`; `none` without one. */
export function rateOption(bitsPerSecond: number | undefined | null): string {
  if (bitsPerSecond === undefined || bitsPerSecond === null) return "none";
  for (const [unit, size] of [
    ["gbit", 1e9],
    ["mbit", 1e6],
    ["kbit", 1e3],
  ] as const) {
    if (bitsPerSecond >= size) return `${Number((bitsPerSecond / size).toFixed(6))}${unit}`;
  }
  return `${bitsPerSecond}bit`;
}

/** An amount of data as options take it, as in `50GB`; `none` without one. */
export function sizeOption(bytes: number | undefined | null): string {
  if (bytes === undefined || bytes === null) return "none";
  for (const [unit, size] of [
    ["TB", 1e12],
    ["GB", 1e9],
    ["MB", 1e6],
  ] as const) {
    if (bytes >= size) return `${Number((bytes / size).toFixed(6))}${unit}`;
  }
  return `${bytes}B`;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { weekday: "short", hour: "2-digit", minute: "2-digit" });

/** A moment of today as `20:41:07`, an earlier one with its day. */
export function formatClock(unixMs: number, nowMs: number): string {
  const isToday = new Date(unixMs).toDateString() === new Date(nowMs).toDateString();
  return (isToday ? clock : day).format(unixMs);
}

export function plural(count: number, word: string): string {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}
