// Events on the time axis: which events get a mark, its short text, and where the texts have room.

import { formatMilliseconds, plural } from "./format.ts";
import type { DaemonEvent } from "./types.ts";

/** Whether something failed, works again, or only changed. */
export type Severity = "bad" | "good" | "info";

export interface Mark {
  /** Unix time (s). */
  time: number;
  text: string;
  severity: Severity;
}

/** The same change of several classes or threads happens within this time (s); they get one mark. */
const MERGE_SECONDS = 1;

/** Unix time of an event (ms); `undefined` if it has no readable one. */
export function eventTime(event: DaemonEvent): number | undefined {
  const time = event.time_ms ?? Date.parse(event.last ?? "");
  return Number.isFinite(time) ? time : undefined;
}

/** The short text of an event and its severity; `undefined` for events that get no mark. */
export function describe(event: DaemonEvent): Omit<Mark, "time"> | undefined {
  const link = event.link ?? (event.user ? [event.user, event.address].filter(Boolean).join(" ") : "link");
  const mark = (severity: Severity, text: string) => ({ severity, text });
  switch (event.event) {
    case undefined:
      return mark("info", event.text);
    case "path_failed":
      return mark("bad", pathFailure(link, event));
    case "path_recovered": {
      const after = event.failed_ms === undefined ? "" : ` after ${formatMilliseconds(event.failed_ms)}`;
      return mark("good", `${link} back${after}`);
    }
    case "link_up":
      return mark("good", `${link} up`);
    case "link_down":
      return mark("bad", `${link} down`);
    case "link_unusable":
      return mark("bad", `${link} cannot be used`);
    case "link_set":
      return mark("info", `${link}: ${event.change ?? "changed"}`);
    case "quota_reached":
      return mark("bad", `${link}: quota used up`);
    case "quota_renewed":
      return mark("good", `${link}: below its quota again`);
    case "transport_changed":
      return mark("info", `${link} over ${event.transport === "tcp" ? "TCP" : "UDP"}`);
    case "pipes_changed":
      return mark("info", `${link}: ${plural(event.pipes ?? 0, "pipe")}`);
    case "connected":
      return mark("good", event.resumed ? "session resumed" : "connected");
    case "disconnected":
      return mark("bad", "connection lost");
    case "refused":
      return mark("bad", `refused: ${event.reason ?? "the server does not say why"}`);
    case "no_answer":
      return mark("bad", "no answer from the server");
    case "answers_again":
      return mark("good", "the server answers again");
    case "server_stopping":
      return mark("info", "server is about to stop");
    case "kill_switch_blocking":
      return mark("bad", "kill switch blocks");
    case "kill_switch_armed":
      return mark("good", "kill switch armed");
    case "kill_switch_lifted":
      return mark("info", "kill switch lifted");
    case "client_connected":
      return mark("good", `${link} connected`);
    case "client_disconnected":
      return mark("info", `${link} disconnected`);
    case "user_quota_reached":
      return mark("bad", `${event.user}: quota used up`);
    case "configuration_read":
      return mark("info", "configuration read again");
    case "ending":
      return mark("info", "mpvpn is ending");
    default:
      return undefined;
  }
}

function pathFailure(link: string, event: DaemonEvent): string {
  const after = event.silence_ms === undefined ? "" : ` after ${formatMilliseconds(event.silence_ms)}`;
  switch (event.reason) {
    case "no_carrier":
      return `${link} lost its carrier`;
    case "unheard":
      return `${link} not heard by the far end, left${after}`;
    default:
      return `${link} silent, left${after}`;
  }
}

/**
 * Events with a further one, unless it is a detail. A repetition, which the daemon merges with the event before, replaces that
 * one.
 */
export function withEvent(events: readonly DaemonEvent[], event: DaemonEvent, max: number): DaemonEvent[] {
  const isSame = (known: DaemonEvent) =>
    known.first !== undefined &&
    known.first === event.first &&
    known.event === event.event &&
    known.link === event.link &&
    known.path === event.path &&
    known.user === event.user;
  if (event.detail) return [...events];
  return [...events.filter((known) => !isSame(known)), event].slice(-max);
}

/** The marks of events, oldest first; equal changes within a second are one. */
export function marksOf(events: readonly DaemonEvent[]): Mark[] {
  const marks: Mark[] = [];
  const subjects = new Map<string, number>();
  for (const event of events) {
    const time = eventTime(event);
    const description = describe(event);
    if (time === undefined || description === undefined) continue;
    const subject = `${event.event} ${event.link ?? ""} ${event.user ?? ""} ${event.address ?? ""}`;
    const before = subjects.get(subject);
    if (before !== undefined && Math.abs(time / 1000 - before) <= MERGE_SECONDS) continue;
    subjects.set(subject, time / 1000);
    marks.push({ time: time / 1000, ...description });
  }
  return marks.sort((a, b) => a.time - b.time);
}

export interface PlacedMark {
  mark: Mark;
  /** Place of the mark on the axis. */
  x: number;
  /** Place of the text's left end and its row; `undefined` if there is no room for the text. */
  label?: { left: number; row: number };
}

/** Space between two texts in a row, and between a mark and its text (px). */
const TEXT_GAP = 8;

/**
 * Places marks between `left` and `right`. The newest text is placed first, as it matters most; a text without room in any of
 * the rows is left out, its mark stays.
 */
export function placeMarks(
  marks: readonly Mark[],
  toX: (time: number) => number,
  textWidth: (text: string) => number,
  [left, right]: readonly [number, number],
  rows: number,
): PlacedMark[] {
  const taken: (readonly [number, number])[][] = Array.from({ length: rows }, () => []);
  const isFree = (row: number, from: number, to: number) =>
    (taken[row] ?? []).every(([a, b]) => to + TEXT_GAP <= a || from >= b + TEXT_GAP);
  const placed: PlacedMark[] = [];
  for (const mark of [...marks].reverse()) {
    const x = toX(mark.time);
    if (x < left || x > right) continue;
    const width = textWidth(mark.text);
    const starts = [x + TEXT_GAP / 2, x - TEXT_GAP / 2 - width];
    const fitting = starts.filter((start) => start >= left && start + width <= right);
    const found = fitting
      .flatMap((start) => taken.map((_, row) => ({ left: start, row })))
      .find((label) => isFree(label.row, label.left, label.left + width));
    if (found) taken[found.row]?.push([found.left, found.left + width]);
    placed.push({ mark, x, ...(found && { label: found }) });
  }
  return placed.reverse();
}
