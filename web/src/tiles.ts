// The most important values, large.

import type { Health } from "./cells.ts";
import { h, setAttribute, setText } from "./dom.ts";

export class Tile {
  readonly element: HTMLElement;
  private readonly value = h("dd", { class: "tile-value" });
  private readonly note = h("dd", { class: "note" });

  constructor(title: string, kind = "") {
    this.element = h("div", { class: `tile ${kind}` }, h("dt", {}, title), this.value, this.note);
  }

  update(value: string, note = "", health?: Health): void {
    setText(this.value, value);
    setText(this.note, note);
    setAttribute(this.value, "class", `tile-value${health === "fails" ? " fails" : ""}`);
  }
}

export function tiles(...shown: Tile[]): HTMLElement {
  return h("dl", { class: "tiles" }, ...shown.map((tile) => tile.element));
}
