import assert from "node:assert/strict";
import { test } from "node:test";
import { matches, nextOrder, pageAt, sorted } from "../src/sorting.ts";

test("numbers are sorted as numbers, names with numbers naturally, unknown values last in both directions", () => {
  const rows = [{ v: 10 }, { v: undefined }, { v: 9 }];
  const values = (isDescending: boolean) => sorted(rows, (row) => row.v, isDescending).map((row) => row.v);
  assert.deepEqual(values(false), [9, 10, undefined]);
  assert.deepEqual(values(true), [10, 9, undefined]);
  assert.deepEqual(
    sorted(["user10", "User9", "user1"], (name) => name, false),
    ["user1", "User9", "user10"],
  );
});

test("sorting leaves the list itself and the order of equal rows as they are", () => {
  const rows = [
    { k: "b", v: 1 },
    { k: "a", v: 1 },
  ];
  assert.deepEqual(
    sorted(rows, (row) => row.v, true),
    rows,
  );
  assert.equal(rows[0]?.k, "b");
});

test("a second click on a column reverses the order, numbers begin with the largest", () => {
  assert.deepEqual(nextOrder({ column: "name", isDescending: false }, "down", true), {
    column: "down",
    isDescending: true,
  });
  assert.deepEqual(nextOrder({ column: "down", isDescending: true }, "down", true), {
    column: "down",
    isDescending: false,
  });
});

test("each word has to be found, in any case and order", () => {
  assert.ok(matches("443 TCP", ["tcp", "198.51.100.9:443"]));
  assert.ok(matches("", [undefined]));
  assert.ok(!matches("tcp 80", ["tcp", "198.51.100.9:443"]));
});

test("a page that is gone becomes the last one, and an empty list has one page", () => {
  assert.deepEqual(pageAt(50, 25, 60), { offset: 50, pages: 3, number: 3 });
  assert.deepEqual(pageAt(50, 25, 30), { offset: 25, pages: 2, number: 2 });
  assert.deepEqual(pageAt(25, 25, 0), { offset: 0, pages: 1, number: 1 });
  assert.deepEqual(pageAt(-5, 25, 30), { offset: 0, pages: 2, number: 1 });
});
