import assert from "node:assert/strict";
import { test } from "node:test";
import { describe, type Mark, marksOf, placeMarks, withEvent } from "../src/marks.ts";
import type { DaemonEvent } from "../src/types.ts";

const at = (second: number, event: Partial<DaemonEvent>): DaemonEvent => ({
  text: "a sentence",
  last: new Date(second * 1000).toISOString(),
  ...event,
});
const failed = { event: "path_failed", link: "wwan0", reason: "silent", silence_ms: 71 };

test("a mark says in a few words what happened to the link", () => {
  assert.deepEqual(describe(at(1, failed)), { severity: "bad", text: "wwan0 silent, left after 71 ms" });
  const recovered = at(1, { event: "path_recovered", link: "wwan0", failed_ms: 3210 });
  assert.deepEqual(describe(recovered), { severity: "good", text: "wwan0 back after 3.2 s" });
  assert.equal(describe(at(1, { ...failed, reason: "no_carrier" }))?.text, "wwan0 lost its carrier");
  const atServer = at(1, { event: "path_failed", user: "alice", address: "10.0.0.2", silence_ms: 90 });
  assert.equal(describe(atServer)?.text, "alice 10.0.0.2 silent, left after 90 ms");
});

test("events of kinds without a mark, and unknown ones, have none", () => {
  assert.equal(describe(at(1, { event: "capacity_changed", link: "wwan0" })), undefined);
  assert.equal(describe(at(1, { event: "something_new" })), undefined);
});

test("an event of which only the text is known keeps it", () => {
  assert.deepEqual(marksOf([{ time_ms: 5000, text: "wwan0 silent" }]), [
    { time: 5, severity: "info", text: "wwan0 silent" },
  ]);
});

test("the same change in several classes is one mark, a later one another", () => {
  const events = [
    at(10, { ...failed, class: "default" }),
    at(10.2, { ...failed, class: "bulk" }),
    at(10.3, { ...failed, link: "eth0" }),
    at(20, { ...failed, class: "default" }),
  ];
  assert.deepEqual(
    marksOf(events).map(({ time }) => time),
    [10, 10.3, 20],
  );
});

test("an event without a readable time has no mark", () => {
  assert.deepEqual(marksOf([{ ...failed, text: "", last: "yesterday" }]), []);
});

test("a repetition replaces the event with which the daemon merged it, and the list is bounded", () => {
  const first = { ...at(1, failed), first: "2026-01-01T00:00:00.000Z", path: "default/wwan0/0", count: 1 };
  const again = { ...first, last: "2026-01-01T00:00:20.000Z", count: 2 };
  assert.deepEqual(withEvent([first], again, 10), [again]);
  assert.equal(withEvent([first], { ...again, path: "bulk/wwan0/0" }, 10).length, 2);
  assert.deepEqual(
    withEvent([first], at(30, { event: "path_opened", detail: true }), 10),
    [first],
    "a detail",
  );
  const many = Array.from({ length: 20 }, (_, i) => at(i, { ...failed, first: String(i) }));
  assert.equal(withEvent(many, at(99, failed), 10).length, 10);
});

const mark = (time: number, text: string): Mark => ({ time, text, severity: "info" });
const place = (marks: Mark[], rows: number) =>
  placeMarks(
    marks,
    (time) => time * 10,
    (text) => text.length * 6,
    [0, 400],
    rows,
  );

test("texts that would overlap go into another row, and the newest keeps its text if no row is free", () => {
  const marks = [mark(20, "first event"), mark(21, "second event"), mark(22, "third event")];
  const labels = place(marks, 1).map(({ label }) => label !== undefined);
  assert.deepEqual([labels.length, labels.at(-1)], [3, true]);
  const placed = place(marks, 2);
  const boxes = placed.flatMap(({ label, mark: { text } }) =>
    label ? [{ ...label, right: label.left + text.length * 6 }] : [],
  );
  for (const [i, a] of boxes.entries()) {
    for (const b of boxes.slice(i + 1)) {
      assert.ok(a.row !== b.row || a.right <= b.left || b.right <= a.left, JSON.stringify([a, b]));
    }
  }
});

test("a text at the right end stands left of its mark, and marks outside of the axis are left out", () => {
  const [placed, ...rest] = place([mark(39, "at the end"), mark(50, "later"), mark(-1, "earlier")], 1);
  assert.equal(rest.length, 0);
  assert.ok(placed?.label && placed.label.left + 60 <= 390, JSON.stringify(placed));
});

test("without rows there are marks without texts", () => {
  assert.deepEqual(
    place([mark(20, "text")], 0).map(({ x, label }) => [x, label]),
    [[200, undefined]],
  );
});
