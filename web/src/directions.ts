// The daemon counts what it sends and receives; the page shows what goes to and from the client.

import type { Rates, Role, SentAndReceived, Status } from "./types.ts";

/** Adds the rates by direction wherever the status has rates. */
export function withDirections(status: Status): Status {
  const { role } = status;
  const rated = <Thing extends SentAndReceived>(thing: Thing): Thing & Rates => ({
    ...thing,
    ...ratesOf(role, thing),
  });
  return {
    ...status,
    links: status.links.map(rated),
    paths: status.paths.map(rated),
    classes: status.classes.map(rated),
    clients: status.clients.map((client) => ({ ...rated(client), paths: client.paths.map(rated) })),
  };
}

function ratesOf(role: Role, { tx_bps, rx_bps }: SentAndReceived): Rates {
  const [down, up] = role === "client" ? [rx_bps, tx_bps] : [tx_bps, rx_bps];
  return { ...(down !== undefined && { down_bps: down }), ...(up !== undefined && { up_bps: up }) };
}
