// What a client shows: its links with their paths, classes, flows, and what the kill switch blocks.

import type { Announcer } from "./announcer.ts";
import { Meter, stateColumn } from "./cells.ts";
import { button, card, h, icon, setAttribute, setHidden, setText } from "./dom.ts";
import { EventsCard } from "./events_card.ts";
import { FlowsCard } from "./flows_card.ts";
import { formatBytes, formatPercent, formatRate, formatRtt } from "./format.ts";
import { ForwardsCard } from "./forwards_card.ts";
import { openLinkDialog } from "./link_dialog.ts";
import { type LinkRow, linkRows } from "./link_rows.ts";
import { describe } from "./marks.ts";
import { SeriesNumbers, swatch } from "./patterns.ts";
import { RatesCard } from "./rates_card.ts";
import { withTraffic } from "./series.ts";
import { DataTable, type TableColumn, text } from "./table.ts";
import { Tile, tiles } from "./tiles.ts";
import type { DaemonEvent, Link, Rates, Status, TrafficClass } from "./types.ts";
import type { View } from "./view.ts";

const KILL_SWITCH = {
  off: ["Off", "Packets may leave past the tunnel while it is down"],
  armed: ["Armed", "Packets past the tunnel are blocked"],
  blocking: ["Blocking", "All packets are blocked until the tunnel is up"],
} as const;

export class ClientView implements View {
  readonly element: HTMLElement;
  private readonly numbers = new SeriesNumbers();
  private readonly down = new Tile("Down", "rate");
  private readonly up = new Tile("Up", "rate");
  private readonly session = new Tile("Session");
  private readonly killSwitch = new Tile("Kill switch");
  private readonly rates: RatesCard;
  private readonly links: DataTable<LinkRow>;
  private readonly classes: DataTable<TrafficClass & { key: string }>;
  private readonly flows = new FlowsCard("client");
  private readonly forwards = new ForwardsCard();
  private readonly events = new EventsCard();
  private readonly blocked: HTMLElement;
  private readonly announcer: Announcer;
  private readonly opened = new Map<string, boolean>();
  private status: Status | undefined;

  constructor(announcer: Announcer) {
    this.announcer = announcer;
    this.rates = new RatesCard({
      title: "Links",
      subject: "link",
      seriesOf: (answer) => withTraffic(answer.links ?? {}),
      numbers: this.numbers,
      onHistory: (answer) => this.events.load(answer.events),
    });
    this.links = new DataTable({
      caption: "Links and their paths",
      columns: this.linkColumns(),
      whenEmpty: "No links: no interface has a default route, or none is configured to be used.",
    });
    this.classes = new DataTable({
      caption: "Classes of traffic",
      columns: classColumns(),
      whenEmpty: "No classes.",
    });
    this.blocked = h("p", { class: "banner bad", role: "alert", hidden: true });
    this.element = h(
      "div",
      { class: "view" },
      this.blocked,
      tiles(this.down, this.up, this.session, this.killSwitch),
      this.rates.element,
      card("Links and paths", "links", [], this.links.element),
      h(
        "div",
        { class: "columns" },
        card("Classes", "classes", [], this.classes.element),
        this.events.element,
      ),
      this.forwards.element,
      this.flows.element,
    );
  }

  liveQuery(): URLSearchParams {
    return new URLSearchParams({ hz: "2" });
  }

  load(): Promise<void> {
    return this.rates.load();
  }

  onStatus(status: Status): void {
    this.status = status;
    const total = status.total ?? {};
    this.down.update(formatRate(total.down_bps));
    this.up.update(formatRate(total.up_bps));
    const { session } = status;
    this.session.update(
      session ? session.user || "connected" : "None",
      [session?.server, ...status.addresses].filter(Boolean).join(" · "),
    );
    const [word, meaning] = KILL_SWITCH[status.kill_switch ?? "off"];
    this.killSwitch.update(word, meaning, status.kill_switch === "blocking" ? "fails" : "works");
    const isBlocked = status.kill_switch === "blocking";
    setText(
      this.blocked,
      isBlocked ? "The kill switch blocks: there is no tunnel, and nothing leaves past it." : "",
    );
    setHidden(this.blocked, !isBlocked);
    const used = status.links.filter((link) => link.state !== "never");
    this.rates.push(new Map(used.map((link): [string, Rates] => [link.name, link])));
    this.showLinks(status);
    this.classes.update(status.classes.map((of) => ({ ...of, key: of.name })));
    this.forwards.onStatus(status);
    this.flows.onStatus(status);
  }

  onEvent(event: DaemonEvent): void {
    this.rates.onEvent(event);
    this.events.add(event);
    const description = describe(event);
    if (description && description.severity !== "info") this.announcer.say(description.text);
  }

  private showLinks(status: Status): void {
    this.links.update(linkRows(status, (link) => this.opened.get(link) ?? false));
  }

  private linkColumns(): TableColumn<LinkRow>[] {
    return [
      { id: "name", title: "Link", isHeading: true, fill: (cell) => this.fillName(cell) },
      stateColumn((row) => row.state),
      { id: "down", title: "Down", isNumber: true, fill: text((row) => formatRate(row.down)) },
      { id: "up", title: "Up", isNumber: true, fill: text((row) => formatRate(row.up)) },
      { id: "share", title: "Share", isNumber: true, fill: fillShare },
      { id: "rtt", title: "RTT", isNumber: true, fill: text((row) => formatRtt(row.rtt)) },
      { id: "jitter", title: "Jitter", isNumber: true, fill: text((row) => formatRtt(row.jitter)) },
      { id: "loss", title: "Loss", isNumber: true, fill: text((row) => formatPercent(row.loss)) },
      { id: "reason", title: "Why", isWide: true, fill: fillReason },
      { id: "action", title: "", fill: (cell) => this.fillAction(cell) },
    ];
  }

  private fillName(cell: HTMLElement): (row: LinkRow) => void {
    let shown: LinkRow | undefined;
    const name = h("span", { class: "name" });
    const details = h("span", { class: "note" });
    const paths = h("button", { type: "button", class: "expand" }, icon("right"), h("span"));
    paths.addEventListener("click", () => {
      if (shown) this.opened.set(shown.link, !(this.opened.get(shown.link) ?? false));
      if (this.status) this.showLinks(this.status);
    });
    const sample = h("span", { class: "sample" });
    cell.append(
      h("div", { class: "link-name" }, sample, h("span", { class: "names" }, name, details), paths),
    );
    return (row) => {
      if (row.isLink && shown === undefined) sample.append(swatch(this.numbers.of(row.link)));
      shown = row;
      setText(name, row.name);
      setText(details, row.details);
      setHidden(paths, !row.isLink || row.paths === 0);
      setAttribute(paths, "aria-expanded", String(this.opened.get(row.link) ?? false));
      const count = `${row.paths} path${row.paths === 1 ? "" : "s"}`;
      if (paths.lastChild) setText(paths.lastChild, count);
      setAttribute(paths, "aria-label", `${count} of ${row.link}`);
    };
  }

  private fillAction(cell: HTMLElement): (row: LinkRow) => void {
    let link: Link | undefined;
    const change = button("Change…", () => link && openLinkDialog(link, this.status?.links ?? []));
    cell.append(change);
    return (row) => {
      link = this.status?.links.find((one) => row.isLink && one.name === row.link);
      setHidden(change, link === undefined);
      setAttribute(change, "aria-label", `Change ${row.link}`);
    };
  }
}

function fillShare(cell: HTMLElement): (row: LinkRow) => void {
  const meter = new Meter(false);
  cell.append(meter.element);
  return (row) => meter.update(row.share, row.share === undefined ? "" : `${row.share.toFixed(0)} %`);
}

function fillReason(cell: HTMLElement): (row: LinkRow) => void {
  const reason = h("span", { class: "reason" });
  const quota = new Meter(true);
  cell.append(reason, quota.element);
  return (row) => {
    setText(reason, row.reason);
    const { used, of } = row.quota ?? {};
    const percent = of ? (100 * (used ?? 0)) / of : undefined;
    quota.update(percent, of ? `${formatBytes(used ?? 0)} of ${formatBytes(of)} this month` : "");
  };
}

function classColumns(): TableColumn<TrafficClass & { key: string }>[] {
  return [
    {
      id: "name",
      title: "Class",
      isHeading: true,
      fill: (cell) => {
        const [name, note] = [h("span", { class: "name" }), h("span", { class: "note" })];
        cell.append(h("span", { class: "names" }, name, note));
        return (row) => {
          setText(name, row.name);
          setText(note, row.reason || howOf(row));
        };
      },
    },
    stateColumn((row) => row.state ?? "up"),
    { id: "down", title: "Down", isNumber: true, fill: text((row) => formatRate(row.down_bps)) },
    { id: "up", title: "Up", isNumber: true, fill: text((row) => formatRate(row.up_bps)) },
    { id: "rtt", title: "RTT", isNumber: true, fill: text((row) => formatRtt(row.rtt_ms)) },
    { id: "loss", title: "Loss", isNumber: true, fill: text((row) => formatPercent(row.loss_pct)) },
    { id: "queue", title: "Queue", isNumber: true, fill: text((row) => formatRtt(row.queue_ms)) },
    { id: "drops", title: "Drops", isNumber: true, fill: text((row) => String(row.drops)) },
  ];
}

/** How the class sends. */
function howOf({ lane, scheduler, cc, order }: TrafficClass): string {
  const fec = order?.fec?.percent ?? 0;
  const words = [`lane ${lane}`, `scheduler ${scheduler}`, cc, fec > 0 ? `FEC ${fec} %` : ""];
  return words.filter(Boolean).join(" · ");
}
