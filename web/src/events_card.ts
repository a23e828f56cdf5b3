// The last events, newest first.

import { card, h, setText } from "./dom.ts";
import { formatClock } from "./format.ts";
import { describe, eventTime, type Severity, withEvent } from "./marks.ts";
import { matches } from "./sorting.ts";
import type { DaemonEvent } from "./types.ts";

/** Events kept, and shown at once. More make the page slow; the rest is in `mpvpn events`. */
const MAX_KEPT = 500;
const MAX_SHOWN = 60;

const SYMBOLS: Record<Severity, string> = { bad: "▼", good: "▲", info: "■" };
const WORDS: Record<Severity, string> = { bad: "failure", good: "recovery", info: "change" };

export class EventsCard {
  readonly element: HTMLElement;
  private events: DaemonEvent[] = [];
  private readonly list = h("ol", { class: "events" });
  private readonly count = h("span", { class: "note" });
  private find = "";

  constructor() {
    const input = h("input", {
      type: "search",
      placeholder: "Find",
      "aria-label": "Find events",
      size: "10",
    });
    input.addEventListener("input", () => {
      this.find = input.value;
      this.draw();
    });
    const region = {
      class: "scroll events-region",
      role: "region",
      "aria-label": "Events, newest first",
      tabindex: "0",
    };
    this.element = card("Events", "events", [this.count, input], h("div", region, this.list));
  }

  load(events: readonly DaemonEvent[]): void {
    this.events = events.slice(-MAX_KEPT);
    this.draw();
  }

  add(event: DaemonEvent): void {
    this.events = withEvent(this.events, event, MAX_KEPT);
    this.draw();
  }

  private draw(): void {
    const found = this.events.filter((event) => matches(this.find, [event.text, event.kind])).reverse();
    setText(this.count, found.length > MAX_SHOWN ? `${MAX_SHOWN} of ${found.length}` : "");
    const shown = found.slice(0, MAX_SHOWN);
    this.list.replaceChildren(
      ...(shown.length > 0 ? shown.map(item) : [h("li", { class: "empty" }, "No events")]),
    );
  }
}

function item(event: DaemonEvent): HTMLElement {
  const severity = describe(event)?.severity ?? "info";
  const time = eventTime(event);
  const moment = time === undefined ? "" : formatClock(time, Date.now());
  const at = time === undefined ? undefined : new Date(time).toISOString();
  const times = (event.count ?? 1) > 1 ? h("span", { class: "times" }, `${event.count}×`) : undefined;
  return h(
    "li",
    { class: `${severity}${event.level === "WARN" ? " warn" : ""}` },
    h("time", { datetime: at }, moment),
    h("span", { class: "symbol", "aria-hidden": "true" }, SYMBOLS[severity]),
    h("span", { class: "hidden-text" }, `${WORDS[severity]}: `),
    h("span", { class: "event-text" }, event.text, times),
  );
}
