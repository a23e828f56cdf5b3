import assert from "node:assert/strict";
import { test } from "node:test";
import { withDirections } from "../src/directions.ts";
import type { Client, Role, Status, TrafficClass } from "../src/types.ts";

const status = (role: Role): Status => ({
  role,
  version: "0.1.0",
  state: "up",
  uptime_s: 1,
  addresses: [],
  session: null,
  classes: [{ name: "default", tx_bps: 1, rx_bps: 2 } as TrafficClass, { name: "bulk" } as TrafficClass],
  links: [],
  paths: [],
  flows: { stream: 0, datagram: 0, udp: 0 },
  clients: [
    { user: "alice", tx_bps: 3, rx_bps: 4, paths: [{ id: "default/0/0", tx_bps: 5, rx_bps: 6 }] } as Client,
  ],
});

test("down is towards the client at both ends of the tunnel", () => {
  const [atClient, atServer] = [withDirections(status("client")), withDirections(status("server"))];
  assert.deepEqual([atClient.classes[0]?.down_bps, atClient.classes[0]?.up_bps], [2, 1]);
  assert.deepEqual([atServer.clients[0]?.down_bps, atServer.clients[0]?.up_bps], [3, 4]);
  assert.deepEqual([atServer.clients[0]?.paths[0]?.down_bps, atServer.clients[0]?.paths[0]?.up_bps], [5, 6]);
});

test("a rate that is not known stays unknown", () => {
  const bulk = withDirections(status("client")).classes[1];
  assert.deepEqual([bulk?.name, bulk?.down_bps, bulk && "up_bps" in bulk], ["bulk", undefined, false]);
});
