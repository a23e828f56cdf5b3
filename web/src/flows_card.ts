// Flows inside the tunnel, read only while they are looked at.

import { isFromDaemon, RefusedError, flows as readFlows } from "./api.ts";
import { card, h, setText } from "./dom.ts";
import { formatBytes, formatDuration, plural } from "./format.ts";
import { Pager } from "./pager.ts";
import { matches, nextOrder, type Order, type SortValue, sorted } from "./sorting.ts";
import { DataTable, type TableColumn, text } from "./table.ts";
import type { Flow, FlowList, Role, Status } from "./types.ts";

/** Pause between readings (ms). The list has up to 1000 flows, which a daemon should not make more often. */
const REFRESH_MS = 2000;
/** Flows on a page. */
const PAGE = 15;

type FlowRow = Flow & { key: string };

const VALUES: Record<string, (flow: Flow) => SortValue> = {
  protocol: (flow) => flow.protocol,
  from: (flow) => flow.from || flow.user,
  to: (flow) => flow.to,
  class: (flow) => flow.class,
  down: (flow) => flow.down_bytes,
  up: (flow) => flow.up_bytes,
  age: (flow) => flow.age_s,
  idle: (flow) => flow.idle_s,
};

export class FlowsCard {
  readonly element: HTMLElement;
  private readonly table: DataTable<FlowRow>;
  private readonly pager = new Pager("flows", PAGE, () => this.draw());
  private readonly note = h("span", { class: "note" });
  private readonly counts = h("span", { class: "note" });
  private list: FlowList = { flows: [], left_out: 0 };
  private order: Order = { column: "idle", isDescending: false };
  private find = "";
  private isSeen = false;
  private lastRead = 0;

  constructor(role: Role) {
    const input = h("input", { type: "search", placeholder: "Find", "aria-label": "Find flows", size: "14" });
    input.addEventListener("input", () => {
      this.find = input.value;
      this.pager.first();
      this.draw();
    });
    this.table = new DataTable({
      caption: "Flows inside the tunnel",
      columns: columns(role),
      whenEmpty: "No flows.",
      order: this.order,
      onSort: (column) => {
        this.order = nextOrder(this.order, column.id, column.isNumber === true);
        this.table.showOrder(this.order);
        this.draw();
      },
    });
    this.element = card(
      "Flows",
      "flows",
      [this.counts, input],
      this.table.element,
      this.pager.element,
      this.note,
    );
    new IntersectionObserver((entries) => {
      this.isSeen = entries.some((entry) => entry.isIntersecting);
    }).observe(this.element);
  }

  onStatus(status: Status): void {
    const { stream, datagram, udp } = status.flows;
    setText(this.counts, `${stream} on streams · ${datagram} as packets · ${udp} as UDP`);
    if (this.isSeen && Date.now() - this.lastRead >= REFRESH_MS) void this.read();
  }

  private async read(): Promise<void> {
    this.lastRead = Date.now();
    try {
      this.list = await readFlows();
      this.draw();
    } catch (error) {
      if (!isFromDaemon(error)) throw error;
      setText(this.note, error instanceof RefusedError ? error.message : "");
    }
  }

  private draw(): void {
    const found = this.list.flows.filter((flow) =>
      matches(this.find, [
        flow.protocol,
        flow.user,
        flow.class,
        flow.from,
        flow.to,
        flow.lane,
        flow.why,
        flow.state,
      ]),
    );
    const sortValue = VALUES[this.order.column] ?? (() => undefined);
    this.pager.update(found.length);
    const { offset } = this.pager;
    const page = sorted(found, sortValue, this.order.isDescending).slice(offset, offset + PAGE);
    this.table.update(withKeys(page));
    const { left_out } = this.list;
    setText(this.note, left_out > 0 ? `${plural(left_out, "flow")} idle for longer: see mpvpn flows.` : "");
  }
}

/** Rows with unique keys: a server does not know from which port of a client a flow comes, so flows may look alike. */
function withKeys(flows: readonly Flow[]): FlowRow[] {
  const seen = new Map<string, number>();
  return flows.map((flow) => {
    const name = `${flow.protocol} ${flow.user} ${flow.from} ${flow.to}`;
    const number = seen.get(name) ?? 0;
    seen.set(name, number + 1);
    return { ...flow, key: `${name} ${number}` };
  });
}

function columns(role: Role): TableColumn<FlowRow>[] {
  const isServer = role === "server";
  const from = isServer ? (flow: Flow) => flow.user ?? "" : (flow: Flow) => flow.from ?? "";
  const all: (TableColumn<FlowRow> | undefined)[] = [
    { id: "to", title: "To", isHeading: true, fill: text((flow) => flow.to) },
    { id: "from", title: isServer ? "User" : "From", fill: text(from) },
    { id: "protocol", title: "Protocol", fill: text((flow) => flow.protocol) },
    isServer ? undefined : { id: "class", title: "Class", fill: text((flow) => flow.class ?? "") },
    {
      id: "lane",
      title: "Travels as",
      fill: text((flow) => [flow.lane, flow.state].filter(Boolean).join(", ")),
    },
    { id: "down", title: "Down", isNumber: true, fill: text((flow) => formatBytes(flow.down_bytes)) },
    { id: "up", title: "Up", isNumber: true, fill: text((flow) => formatBytes(flow.up_bytes)) },
    { id: "age", title: "Age", isNumber: true, fill: text((flow) => formatDuration(flow.age_s)) },
    { id: "idle", title: "Idle", isNumber: true, fill: text((flow) => formatDuration(flow.idle_s)) },
  ];
  const known = all.filter((column) => column !== undefined);
  return known.map((column) => ({ ...column, isSortable: column.id in VALUES }));
}
