import assert from "node:assert/strict";
import { test } from "node:test";
import { changeOf, commandOf, describeChange, formOf, warningOf } from "../src/link_changes.ts";
import { linkRows } from "../src/link_rows.ts";
import type { Link, Path, Status } from "../src/types.ts";

const link = (settings: Partial<Link> = {}): Link => ({
  name: "wwan0",
  state: "up",
  tier: "primary",
  reason: "",
  addresses: [],
  tx_bytes: 0,
  rx_bytes: 0,
  ...settings,
});
const path = (settings: Partial<Path> = {}): Path => ({
  id: "default/wwan0/0",
  class: "default",
  link: "wwan0",
  local: "192.0.2.7:40001",
  remote: "203.0.113.1:4433",
  state: "active",
  reason: "",
  rtt_ms: 40,
  min_rtt_ms: 30,
  jitter_ms: 1,
  loss_pct: 0,
  recent_packets: 100,
  mtu: 1472,
  ...settings,
});
const status = (links: Link[], paths: Path[]): Status => ({
  role: "client",
  version: "0.1.0",
  state: "up",
  uptime_s: 1,
  addresses: [],
  session: null,
  classes: [],
  links,
  paths,
  flows: { stream: 0, datagram: 0, udp: 0 },
  clients: [],
});

test("only what differs is changed, and an emptied limit is no limit", () => {
  const now = link({ up_cap_bps: 20e6, quota_bytes: 50e9 });
  assert.deepEqual(changeOf(now, formOf(now)), {});
  const filledIn = { ...formOf(now), tier: "backup", metered: true, up: " ", pipes: "4", quotaReset: true };
  assert.deepEqual(changeOf(now, filledIn), {
    tier: "backup",
    metered: true,
    up: "none",
    pipes: "4",
    "quota-reset": true,
  });
});

test("the question names before and after, and the command that does the same", () => {
  const now = link({ up_cap_bps: 20e6 });
  const change = { tier: "backup", metered: true, up: "none", weight: "3", "quota-reset": true };
  assert.deepEqual(describeChange(now, change), [
    "tier: primary → backup",
    "metered: no → yes",
    "up: 20mbit → none",
    "weight: 1 → 3",
    "quota: count this month from 0 again",
  ]);
  assert.equal(
    commandOf(now, change),
    "mpvpn link set wwan0 --tier backup --metered yes --up none --weight 3 --quota-reset",
  );
});

test("taking away the last link that works is warned of", () => {
  const [wwan0, eth0] = [link(), link({ name: "eth0" })];
  assert.equal(warningOf(wwan0, { up: "20mbit" }, [wwan0]), undefined);
  assert.match(warningOf(wwan0, { tier: "never" }, [wwan0, eth0]) ?? "", /All traffic leaves wwan0/);
  const withoutEth0 = [wwan0, { ...eth0, state: "down" as const }];
  assert.match(warningOf(wwan0, { tier: "never" }, withoutEth0) ?? "", /the tunnel stands still/);
});

test("a link has the values of its best working path and its share of the traffic", () => {
  const links = [link({ down_bps: 30, up_bps: 10 }), link({ name: "eth0", down_bps: 100, up_bps: 20 })];
  const paths = [
    path({ rtt_ms: 40, loss_pct: 1 }),
    path({ id: "bulk/wwan0/0", rtt_ms: 35, loss_pct: 2 }),
    path({ id: "critical/wwan0/0", state: "down", rtt_ms: 1, loss_pct: 90 }),
    path({ id: "asleep/wwan0/0", state: "standby", rtt_ms: 0, loss_pct: 0 }),
    path({ id: "idle/wwan0/0", rtt_ms: 50, loss_pct: 3, recent_packets: 0 }),
  ];
  const [row, ...rest] = linkRows(status(links, paths), () => false);
  assert.deepEqual([row?.share, row?.rtt, row?.loss, row?.paths], [25, 35, 2, 5]);
  assert.equal(rest.length, 1);
});

test("paths are shown below their link if it is opened, with unique keys", () => {
  const links = [link(), link({ name: "eth0", state: "down" })];
  const rows = linkRows(status(links, [path(), path({ id: "bulk/wwan0/0" })]), (name) => name === "wwan0");
  assert.deepEqual(
    rows.map((row) => row.name),
    ["wwan0", "default/wwan0/0", "bulk/wwan0/0", "eth0"],
  );
  assert.equal(new Set(rows.map((row) => row.key)).size, 4);
});

test("a share without traffic and a loss without packets are not known", () => {
  const idle = path({ loss_pct: 0, recent_packets: 0 });
  const [row, pathRow] = linkRows(status([link()], [idle]), () => true);
  assert.deepEqual([row?.share, row?.loss, pathRow?.loss], [undefined, undefined, undefined]);
});
