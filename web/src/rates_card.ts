// The rates of the last 5 minutes or 24 hours: two charts, a legend with values, and the same as a table.

import { history, isFromDaemon } from "./api.ts";
import { StackedChart } from "./chart.ts";
import { card, h, icon, setAttribute, setHidden, setText } from "./dom.ts";
import { formatClock, formatRate } from "./format.ts";
import { type Mark, marksOf, withEvent } from "./marks.ts";
import { onColoursChange, type SeriesNumbers, swatch } from "./patterns.ts";
import { type Column, intervals, RateSeries } from "./series.ts";
import type { DaemonEvent, Directions, HistoryAnswer, Rates } from "./types.ts";

export const SHORT_SPAN = 300;
const LONG_SPAN = 86_400;
/** Pause between readings of the 24 hours (ms): the daemon's samples of them are minutes long. */
const LONG_REFRESH_MS = 60_000;
/** Events kept for marks. */
const MAX_EVENTS = 500;
/** A difference of clocks up to this (s) is the granularity of the history, not of clocks. */
const CLOCK_TOLERANCE = 1.5;
/** Rows of the table. */
const TABLE_ROWS = 10;
/** Pause between updates of the table and the summary (ms): more often, and screen readers cannot follow. */
const TABLE_REFRESH_MS = 5000;
/** Below this width of the page (CSS px) texts of marks have one row. */
const NARROW = 640;

/** A mark this near to the pointer is meant, as a part of the time axis: some 8 px of a wide chart. */
const NEAR = 0.008;
/** Marks whose texts are shown at the pointer. */
const MAX_POINTED = 2;

interface Options {
  title: string;
  /** What the series are, as in `link`. */
  subject: string;
  seriesOf: (answer: HistoryAnswer) => Record<string, Directions>;
  numbers: SeriesNumbers;
  onHistory?: (answer: HistoryAnswer) => void;
}

export class RatesCard {
  readonly element: HTMLElement;
  private readonly options: Options;
  private readonly down: StackedChart;
  private readonly up: StackedChart;
  private readonly short = new RateSeries(SHORT_SPAN);
  private readonly long = new RateSeries(LONG_SPAN);
  private span = SHORT_SPAN;
  private events: DaemonEvent[] = [];
  private marks: Mark[] = [];
  private clockOffset = 0;
  private pointer: number | null = null;
  private longTimer: number | undefined;
  private lastTable = 0;
  private readonly pointed = h("span", { class: "pointed" });
  private readonly legend = h("ul", { class: "legend" });
  private readonly legendItems = new Map<
    string,
    { element: HTMLElement; down: HTMLElement; up: HTMLElement }
  >();
  private readonly nothing = h("p", { class: "empty" }, "No rates are known of this time.");
  private readonly tableHead = h("thead");
  private readonly tableBody = h("tbody");
  private readonly details: HTMLDetailsElement;

  constructor(options: Options) {
    this.options = options;
    const shared = {
      numbers: options.numbers,
      formatTime: (time: number) => this.timeText(time, window.innerWidth >= NARROW),
      onPointer: (place: number | null) => this.onPointer(place),
    };
    const [downHost, upHost] = [chartHost(), chartHost()];
    const labelRows = () => (window.innerWidth < NARROW ? 1 : 2);
    this.down = new StackedChart(downHost, { ...shared, height: 190, labelRows, hasTimeAxis: false });
    this.up = new StackedChart(upHost, { ...shared, height: 130, labelRows: () => 0, hasTimeAxis: true });
    this.details = h(
      "details",
      { class: "as-table" },
      h("summary", {}, "As a table"),
      h(
        "div",
        { class: "scroll", role: "region", "aria-label": "Rates as a table", tabindex: "0" },
        h("table", { class: "plain" }, h("caption", {}, "Mean rates"), this.tableHead, this.tableBody),
      ),
    );
    this.details.addEventListener("toggle", () => this.showTable());
    this.element = card(
      options.title,
      "rates",
      [this.pointed, this.spanChoice()],
      this.legend,
      this.nothing,
      chartTitle("down", "Down", "bit/s"),
      downHost,
      chartTitle("up", "Up", "bit/s"),
      upHost,
      this.details,
    );
    onColoursChange(() => {
      this.down.rebuild();
      this.up.rebuild();
      for (const [key, { element }] of this.legendItems) {
        element.firstChild?.replaceWith(swatch(options.numbers.of(key)));
      }
    });
  }

  /** Reads what the daemon remembers: after the start, and after each interruption. */
  async load(): Promise<void> {
    const answer = await history(SHORT_SPAN);
    const newest = (answer.begin_ms + answer.step_ms * answer.total.down_bps.length) / 1000;
    const offset = newest - Date.now() / 1000;
    this.clockOffset = Math.abs(offset) <= CLOCK_TOLERANCE ? 0 : offset;
    this.short.load(answer, this.options.seriesOf(answer));
    this.events = answer.events.slice(-MAX_EVENTS);
    this.marks = marksOf(this.events);
    this.options.onHistory?.(answer);
    if (this.span === LONG_SPAN) await this.loadLong();
    this.draw();
  }

  /** Adds the rates of a status. */
  push(samples: ReadonlyMap<string, Rates>): void {
    this.short.push(this.now(), samples);
    if (this.span === SHORT_SPAN) this.draw();
    else this.showLegend();
  }

  onEvent(event: DaemonEvent): void {
    this.events = withEvent(this.events, event, MAX_EVENTS);
    this.marks = marksOf(this.events);
  }

  /** The time by the clock of the daemon (unix time, s). */
  now(): number {
    return Date.now() / 1000 + this.clockOffset;
  }

  private async loadLong(): Promise<void> {
    clearTimeout(this.longTimer);
    this.longTimer = window.setTimeout(() => this.refreshLong(), LONG_REFRESH_MS);
    const answer = await history(LONG_SPAN);
    this.long.load(answer, this.options.seriesOf(answer));
  }

  private async refreshLong(): Promise<void> {
    if (this.span !== LONG_SPAN || !this.element.isConnected) return;
    try {
      await this.loadLong();
      this.draw();
      this.showTable();
    } catch (error) {
      // The stream reports a daemon that is away, and loads all when it is back.
      if (!isFromDaemon(error)) throw error;
    }
  }

  private spanChoice(): HTMLElement {
    const choice = h("fieldset", { class: "choice" }, h("legend", { class: "hidden-text" }, "Time shown"));
    for (const [span, text] of [
      [SHORT_SPAN, "5 min"],
      [LONG_SPAN, "24 h"],
    ] as const) {
      const input = h("input", {
        type: "radio",
        name: "span",
        value: String(span),
        checked: span === this.span,
      });
      input.addEventListener("change", () => {
        this.span = span;
        if (span === LONG_SPAN) void this.refreshLong();
        this.draw();
        this.showTable();
      });
      choice.append(h("label", {}, input, h("span", {}, text)));
    }
    return choice;
  }

  private shown(): RateSeries {
    return this.span === SHORT_SPAN ? this.short : this.long;
  }

  private draw(): void {
    const { times, columns } = this.shown();
    const to = this.now();
    setHidden(this.nothing, columns.length > 0);
    const shared = {
      times,
      keys: columns.map((column) => column.key),
      marks: this.marks,
      from: to - this.span,
      to,
    };
    this.down.show({ ...shared, values: columns.map((column) => column.down) });
    this.up.show({ ...shared, values: columns.map((column) => column.up) });
    this.showLegend();
    if (Date.now() - this.lastTable >= TABLE_REFRESH_MS) this.showTable();
  }

  private onPointer(place: number | null): void {
    this.pointer = place;
    const time = place === null ? undefined : this.shown().times[place];
    setText(this.pointed, time === undefined ? "" : this.pointedText(time));
    this.showLegend();
  }

  /** The moment at the pointer, and what happened then. */
  private pointedText(time: number): string {
    const near = this.marks.filter((mark) => Math.abs(mark.time - time) <= this.span * NEAR);
    const texts = near.slice(-MAX_POINTED).map((mark) => mark.text);
    return [formatClock(time * 1000, this.now() * 1000), ...texts].join(" · ");
  }

  private showLegend(): void {
    const { columns } = this.pointer === null ? this.short : this.shown();
    const at = (values: Column["down"]) => values.at(this.pointer ?? -1) ?? null;
    for (const [key, { element }] of this.legendItems) {
      setHidden(element, !columns.some((column) => column.key === key));
    }
    for (const column of columns) {
      const item = this.legendItem(column.key);
      setText(item.down, formatRate(at(column.down)));
      setText(item.up, formatRate(at(column.up)));
    }
  }

  private legendItem(key: string): { element: HTMLElement; down: HTMLElement; up: HTMLElement } {
    const known = this.legendItems.get(key);
    if (known) return known;
    const [down, up] = [h("span", { class: "value" }), h("span", { class: "value" })];
    const arrow = (direction: "down" | "up") =>
      h("span", { class: "arrow" }, icon(direction), h("span", { class: "hidden-text" }, direction));
    const element = h(
      "li",
      {},
      swatch(this.options.numbers.of(key)),
      h("span", { class: "name" }, key),
      arrow("down"),
      down,
      arrow("up"),
      up,
    );
    this.legend.append(element);
    const item = { element, down, up };
    this.legendItems.set(key, item);
    return item;
  }

  /** What the charts show, in words and as a table. */
  private showTable(): void {
    this.lastTable = Date.now();
    const { columns } = this.shown();
    const span = this.span === SHORT_SPAN ? "last 5 minutes" : "last 24 hours";
    for (const [chart, direction] of [
      [this.down, "down"],
      [this.up, "up"],
    ] as const) {
      const rates = columns.map((column) => `${column.key} ${formatRate(column[direction].at(-1))}`);
      const summary = `Rate ${direction} by ${this.options.subject}, ${span}. Newest: ${rates.join(", ") || "none"}.`;
      setAttribute(chart.element, "aria-label", summary);
    }
    if (!this.details.open) return;
    const headings = columns.flatMap(({ key }) => [`${key} down`, `${key} up`]);
    const headingCells = ["Until", ...headings].map((title) => h("th", { scope: "col" }, title));
    this.tableHead.replaceChildren(h("tr", {}, ...headingCells));
    const rows = intervals(this.shown(), this.now(), this.span, TABLE_ROWS).map((interval) => {
      const cells = columns.flatMap((_, place) => [interval.down[place], interval.up[place]]);
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, this.timeText(interval.end)),
        ...cells.map((rate) => h("td", { class: "number" }, formatRate(rate))),
      );
    });
    this.tableBody.replaceChildren(...rows);
  }

  private timeText(time: number, hasSeconds = true): string {
    const text = new Date(time * 1000).toTimeString();
    return this.span === SHORT_SPAN && hasSeconds ? text.slice(0, 8) : text.slice(0, 5);
  }
}

function chartHost(): HTMLElement {
  return h("div", { class: "chart", role: "img", "aria-label": "Rates" });
}

function chartTitle(direction: "down" | "up", title: string, unit: string): HTMLElement {
  return h("h3", { class: "chart-title" }, icon(direction), title, h("span", { class: "unit" }, unit));
}
