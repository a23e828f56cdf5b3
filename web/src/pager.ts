// Buttons that leaf through the pages of a list.

import { button, h, setHidden, setText } from "./dom.ts";
import { type Page, pageAt } from "./sorting.ts";

export class Pager {
  readonly element: HTMLElement;
  private readonly text = h("span", { class: "note" });
  private readonly back = button("Previous", () => this.turn(-1));
  private readonly next = button("Next", () => this.turn(1));
  private page: Page = { offset: 0, pages: 1, number: 1 };
  private readonly count: number;
  private readonly onTurn: () => void;

  /** `count` rows a page. */
  constructor(what: string, count: number, onTurn: () => void) {
    this.count = count;
    this.onTurn = onTurn;
    this.element = h(
      "nav",
      { class: "pager", "aria-label": `Pages of ${what}` },
      this.back,
      this.text,
      this.next,
    );
  }

  get offset(): number {
    return this.page.offset;
  }

  first(): void {
    this.page = { ...this.page, offset: 0 };
  }

  /** Shows how many rows there are, and goes to the last page if this one is gone. */
  update(total: number): void {
    this.page = pageAt(this.page.offset, this.count, total);
    const { offset, pages, number } = this.page;
    const last = Math.min(total, offset + this.count);
    setText(this.text, `${total === 0 ? 0 : offset + 1}–${last} of ${total}`);
    this.back.disabled = number === 1;
    this.next.disabled = number === pages;
    setHidden(this.element, pages === 1);
  }

  private turn(by: number): void {
    this.page = { ...this.page, offset: Math.max(0, this.page.offset + by * this.count) };
    this.onTurn();
  }
}
