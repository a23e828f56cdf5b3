// Contents of cells that several tables have.

import { h, type IconName, icon, setAttribute, setHidden, setText, svg } from "./dom.ts";
import type { TableColumn } from "./table.ts";
import type { Values } from "./types.ts";

/** How well something works. */
export type Health = "works" | "waits" | "fails" | "off";

const HEALTH: Record<string, Health> = {
  up: "works",
  active: "works",
  standby: "waits",
  starting: "waits",
  degraded: "waits",
  connecting: "waits",
  "no-answer": "fails",
  refused: "fails",
  reconnecting: "fails",
  stopping: "fails",
  asleep: "off",
  never: "off",
  down: "fails",
  revoked: "off",
  expired: "off",
  "quota-used-up": "fails",
};
const ICONS: Record<Health, IconName> = { works: "check", waits: "pause", fails: "cross", off: "slash" };

export function healthOf(state: string): Health {
  return HEALTH[state] ?? "waits";
}

/** A state as a word with an icon. */
export class StateBadge {
  readonly element = h("span", { class: "state" });
  private readonly word = h("span");
  private health: Health | undefined;

  update(state: string, words = state.replaceAll("-", " ")): void {
    const health = healthOf(state);
    if (health !== this.health) {
      this.health = health;
      setAttribute(this.element, "class", `state ${health}`);
      this.element.replaceChildren(icon(ICONS[health]), this.word);
    }
    setText(this.word, words);
  }
}

export function stateColumn<Row>(stateOf: (row: Row) => string): TableColumn<Row> {
  return {
    id: "state",
    title: "State",
    fill: (cell) => {
      const badge = new StateBadge();
      cell.append(badge.element);
      return (row) => badge.update(stateOf(row));
    },
  };
}

/** A share of a whole as a bar beside its text. */
export class Meter {
  readonly element: HTMLElement;
  private readonly bar = svg("rect", { x: "0", y: "0", width: "0", height: "4", rx: "2" });
  private readonly label = h("span", { class: "meter-text" });
  private readonly isQuota: boolean;

  /** `isQuota`: a bar that is nearly full is a warning. */
  constructor(isQuota: boolean) {
    this.isQuota = isQuota;
    const track = svg("rect", { class: "track", x: "0", y: "0", width: "100", height: "4", rx: "2" });
    const attributes = {
      class: "meter",
      viewBox: "0 0 100 4",
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    };
    this.element = h("span", { class: "metered" }, this.label, svg("svg", attributes, track, this.bar));
  }

  /** `percent` is `undefined` where the share is not known. */
  update(percent: number | undefined, text: string): void {
    setText(this.label, text);
    setHidden(this.element, text === "");
    const width = Math.min(100, Math.max(0, percent ?? 0)).toFixed(0);
    if (this.bar.getAttribute("width") !== width) this.bar.setAttribute("width", width);
    setAttribute(
      this.bar,
      "class",
      this.isQuota && percent !== undefined && percent >= 90 ? "nearly-full" : undefined,
    );
  }
}

/** Width and height of a line of the last minutes. */
const [LINE_WIDTH, LINE_HEIGHT] = [96, 22];

/** The last minutes of a rate as a small line. */
export class RateLine {
  readonly element: SVGElement;
  private readonly path = svg("path", { class: "rate-line", d: "" });

  constructor() {
    const attributes = {
      class: "rate-line-box",
      viewBox: `0 0 ${LINE_WIDTH} ${LINE_HEIGHT}`,
      "aria-hidden": "true",
    };
    this.element = svg("svg", attributes, this.path);
  }

  /** The values of the last `spanSeconds`, at their times. */
  update(times: readonly number[], values: Values, now: number, spanSeconds: number): void {
    const max = Math.max(1, ...values.map((value) => value ?? 0));
    const points = times.flatMap((time, place) => {
      const value = values[place] ?? null;
      if (value === null) return [];
      const x = LINE_WIDTH * (1 - (now - time) / spanSeconds);
      return [`${x.toFixed(1)} ${((1 - value / max) * (LINE_HEIGHT - 2) + 1).toFixed(1)}`];
    });
    this.path.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
  }
}
