// The sessions of a server: those of one page of the sorted list, with their paths.

import { RateLine } from "./cells.ts";
import { card, h, icon, setAttribute, setHidden, setText } from "./dom.ts";
import { formatDuration, formatPercent, formatRate, formatRtt, plural, rateOption } from "./format.ts";
import { isMeasured, pathRow } from "./link_rows.ts";
import { Pager } from "./pager.ts";
import { SHORT_SPAN } from "./rates_card.ts";
import { RateSeries } from "./series.ts";
import { nextOrder, type Order } from "./sorting.ts";
import { DataTable, type TableColumn, text } from "./table.ts";
import type { Client, HistoryAnswer, Rates, Status, User } from "./types.ts";

/** Sessions on a page. The daemon makes statuses of those that are shown only. */
const PAGE = 25;
/** Pause after the last letter before the daemon is asked (ms). */
const TYPING_MS = 250;

interface SessionRow {
  key: string;
  classes: string;
  /** The session, also of a path. */
  session: string;
  isSession: boolean;
  name: string;
  note: string;
  down: number | undefined;
  up: number | undefined;
  limits: string;
  rtt: number | undefined;
  loss: number | undefined;
  paths: number;
  working: number;
  details: string;
}

export class SessionsCard {
  readonly element: HTMLElement;
  private readonly table: DataTable<SessionRow>;
  private readonly pager: Pager;
  private readonly count = h("span", { class: "note" });
  private readonly opened = new Set<string>();
  private readonly series = new RateSeries(SHORT_SPAN);
  private order: Order = { column: "down", isDescending: true };
  private find = "";
  private typing: number | undefined;
  private status: Status | undefined;
  private users = new Map<string, User>();

  /** `onQuery` is called when other sessions are wanted. */
  constructor(onQuery: () => void) {
    const input = h("input", {
      type: "search",
      placeholder: "Find",
      "aria-label": "Find sessions",
      size: "14",
    });
    input.addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = window.setTimeout(() => {
        this.find = input.value.trim();
        this.pager.first();
        onQuery();
      }, TYPING_MS);
    });
    this.pager = new Pager("sessions", PAGE, onQuery);
    this.table = new DataTable({
      caption: "Sessions and their paths",
      columns: this.columns(),
      whenEmpty: "No sessions.",
      order: this.order,
      onSort: (column) => {
        this.order = nextOrder(this.order, column.id, column.isNumber === true);
        this.table.showOrder(this.order);
        this.pager.first();
        onQuery();
      },
    });
    this.element = card("Sessions", "sessions", [this.count, input], this.table.element, this.pager.element);
  }

  query(): URLSearchParams {
    const query = new URLSearchParams({
      offset: String(this.pager.offset),
      count: String(PAGE),
      sort: sortParameter(this.order),
    });
    if (this.find !== "") query.set("find", this.find);
    return query;
  }

  load(answer: HistoryAnswer): void {
    this.series.load(answer, answer.sessions ?? {});
  }

  onUsers(users: readonly User[]): void {
    this.users = new Map(users.map((user) => [user.user, user]));
  }

  onStatus(status: Status, now: number): void {
    this.status = status;
    const samples = status.clients.map((client): [string, Rates] => [client.id, client]);
    this.series.push(now, new Map(samples));
    const found = status.sessions_found ?? status.clients.length;
    const all = status.sessions_total ?? found;
    setText(this.count, this.find === "" ? plural(all, "session") : `${found} of ${plural(all, "session")}`);
    this.pager.update(found);
    this.draw(now);
  }

  private draw(now: number): void {
    this.now = now;
    const rows = (this.status?.clients ?? []).flatMap((client) => this.rowsOf(client));
    this.table.update(rows);
  }

  private now = 0;

  private rowsOf(client: Client): SessionRow[] {
    const session = client.id;
    const working = client.paths.filter((path) => path.state !== "down");
    const measured = working.filter(isMeasured);
    const row: SessionRow = {
      key: `session ${session}`,
      classes: client.paths.length > 0 && working.length === 0 ? "fails" : "",
      session,
      isSession: true,
      name: client.user || "(no user)",
      note: client.addresses.map((address) => address.split("/")[0]).join(" · "),
      down: client.down_bps,
      up: client.up_bps,
      limits: limitsOf(this.users.get(client.user)),
      rtt: measured.length > 0 ? Math.min(...measured.map((path) => path.rtt_ms)) : undefined,
      loss: measured.length > 0 ? Math.max(...measured.map((path) => path.loss_pct)) : undefined,
      paths: client.paths.length,
      working: working.length,
      details: formatDuration(client.connected_s),
    };
    if (!this.opened.has(session)) return [row];
    return [
      row,
      ...client.paths.map((path): SessionRow => {
        const { name, details, reason, classes, down, up, rtt, loss, state } = pathRow(path, 0);
        return {
          key: `path ${session} ${path.id}`,
          classes,
          session,
          isSession: false,
          name,
          note: [state, details, reason].filter(Boolean).join(" · "),
          down,
          up,
          limits: "",
          rtt,
          loss,
          paths: 0,
          working: 0,
          details: "",
        };
      }),
    ];
  }

  private columns(): TableColumn<SessionRow>[] {
    return [
      {
        id: "user",
        title: "Session",
        isHeading: true,
        isSortable: true,
        fill: (cell) => {
          const [name, note] = [h("span", { class: "name" }), h("span", { class: "note" })];
          cell.append(h("span", { class: "names" }, name, note));
          return (row) => {
            setText(name, row.name);
            setText(note, row.note);
          };
        },
      },
      {
        id: "down",
        title: "Down",
        isNumber: true,
        isSortable: true,
        fill: text((row) => formatRate(row.down)),
      },
      { id: "up", title: "Up", isNumber: true, isSortable: true, fill: text((row) => formatRate(row.up)) },
      { id: "line", title: "5 min down", fill: (cell) => this.fillLine(cell) },
      { id: "limits", title: "Limits", fill: text((row) => row.limits) },
      { id: "rtt", title: "RTT", isNumber: true, fill: text((row) => formatRtt(row.rtt)) },
      {
        id: "loss",
        title: "Loss",
        isNumber: true,
        fill: text((row) => formatPercent(row.loss)),
      },
      {
        id: "connected",
        title: "Connected",
        isNumber: true,
        isSortable: true,
        fill: text((row) => row.details),
      },
      { id: "paths", title: "Paths", isNumber: true, fill: (cell) => this.fillPaths(cell) },
    ];
  }

  private fillLine(cell: HTMLElement): (row: SessionRow) => void {
    const line = new RateLine();
    cell.append(line.element);
    return (row) => {
      const column = row.isSession ? this.series.columns.find(({ key }) => key === row.session) : undefined;
      line.update(this.series.times, column?.down ?? [], this.now, SHORT_SPAN);
    };
  }

  private fillPaths(cell: HTMLElement): (row: SessionRow) => void {
    let session = "";
    const toggle = h("button", { type: "button", class: "expand" }, h("span"), icon("right"));
    toggle.addEventListener("click", () => {
      if (!this.opened.delete(session)) this.opened.add(session);
      this.draw(this.now);
    });
    cell.append(toggle);
    return (row) => {
      session = row.session;
      setHidden(toggle, !row.isSession);
      setAttribute(toggle, "aria-expanded", String(this.opened.has(session)));
      const count = row.working === row.paths ? String(row.paths) : `${row.working} of ${row.paths}`;
      if (toggle.firstChild) setText(toggle.firstChild, count);
      setAttribute(toggle, "aria-label", `${count} paths of ${row.name} ${row.note}`);
    };
  }
}

/** The daemon sorts names from A to Z, values from the largest, and times from the newest; `-` reverses it. */
export function sortParameter({ column, isDescending }: Order): string {
  const isUsual = column === "down" || column === "up" ? isDescending : !isDescending;
  return isUsual ? column : `-${column}`;
}

/** The limits of a user in a few words. */
export function limitsOf(user: User | undefined): string {
  if (!user) return "";
  const rate = (direction: string, bps: number | null) =>
    bps === null ? "" : `${direction}\u00a0${rateOption(bps)}`;
  return [rate("↓", user.down_cap_bps), rate("↑", user.up_cap_bps)].filter(Boolean).join(" ");
}
