import assert from "node:assert/strict";
import { test } from "node:test";
import type { User } from "../src/types.ts";
import { EMPTY_FORM, userChange, userForm } from "../src/user_changes.ts";

const alice: User = {
  user: "alice",
  state: "active",
  expires: "2027-01-31",
  sessions: 2,
  up_cap_bps: null,
  down_cap_bps: 20e6,
  quota_bytes: 50e9,
  quota_used_bytes: 0,
};

test("a form shows the settings of a user, and nothing where there is none", () => {
  assert.deepEqual(userForm(alice), {
    expires: "2027-01-31",
    down: "20mbit",
    up: "",
    quota: "50GB",
    sessions: "2",
  });
});

test("only what differs is changed, and an emptied setting is none", () => {
  const before = userForm(alice);
  assert.deepEqual(userChange(before, before), {});
  assert.deepEqual(userChange(before, { ...before, down: "", up: " 5mbit " }), { down: "none", up: "5mbit" });
});

test("a new user has what was filled in", () => {
  assert.deepEqual(userChange(EMPTY_FORM, { ...EMPTY_FORM, expires: "90d" }), { expires: "90d" });
});
