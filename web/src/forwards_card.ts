// The ports that lead on to hosts, with what they have carried; left out where there are none.

import { card, setHidden } from "./dom.ts";
import { formatBytes } from "./format.ts";
import { DataTable, type TableColumn, text } from "./table.ts";
import type { Forward, Status } from "./types.ts";

type ForwardRow = Forward & { key: string };

export class ForwardsCard {
  readonly element: HTMLElement;
  private readonly table = new DataTable<ForwardRow>({
    caption: "Forwarded ports",
    columns: columns(),
    whenEmpty: "No forwarded ports.",
  });

  constructor() {
    this.element = card("Forwarded ports", "forwards", [], this.table.element);
    setHidden(this.element, true);
  }

  onStatus({ forwards = [] }: Status): void {
    setHidden(this.element, forwards.length === 0);
    this.table.update(forwards.map((forward) => ({ ...forward, key: forward.port })));
  }
}

function columns(): TableColumn<ForwardRow>[] {
  const now = (row: ForwardRow) => row.addresses.join(" · ") || "nobody: no session";
  return [
    { id: "port", title: "Port", isHeading: true, fill: text((row) => row.port) },
    { id: "to", title: "Leads to", fill: text((row) => row.to) },
    { id: "now", title: "Now", fill: text(now) },
    { id: "tx", title: "To it", isNumber: true, fill: text((row) => formatBytes(row.tx_bytes)) },
    { id: "rx", title: "Back", isNumber: true, fill: text((row) => formatBytes(row.rx_bytes)) },
  ];
}
