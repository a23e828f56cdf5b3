// Tables whose rows stay the same elements while their values change, so that focus and selection survive updates.

import { h, icon, setAttribute, setText } from "./dom.ts";
import type { Order } from "./sorting.ts";

export interface TableRow {
  /** Unique in the table. */
  key: string;
  /** Classes of the row's element. */
  classes?: string;
}

export interface TableColumn<Row> {
  id: string;
  title: string;
  isNumber?: boolean;
  isSortable?: boolean;
  /** The first column: its cells are the headings of their rows. */
  isHeading?: boolean;
  /** On narrow screens the cell takes a whole line. */
  isWide?: boolean;
  /** Fills a new cell, and returns what updates it. */
  fill(cell: HTMLElement): (row: Row) => void;
}

/** Fills cells with a text. */
export function text<Row>(textOf: (row: Row) => string): (cell: HTMLElement) => (row: Row) => void {
  return (cell) => (row) => setText(cell, textOf(row));
}

interface Options<Row> {
  caption: string;
  columns: TableColumn<Row>[];
  /** Shown instead of rows. */
  whenEmpty: string;
  order?: Order;
  onSort?: (column: TableColumn<Row>) => void;
}

export class DataTable<Row extends TableRow> {
  readonly element: HTMLElement;
  private readonly body = h("tbody", { role: "rowgroup" });
  private readonly empty: HTMLElement;
  private readonly headings = new Map<string, HTMLElement>();
  private readonly rows = new Map<string, { element: HTMLElement; update: (row: Row) => void }>();
  private readonly columns: TableColumn<Row>[];

  constructor({ caption, columns, whenEmpty, order, onSort }: Options<Row>) {
    this.columns = columns;
    this.empty = h("p", { class: "empty" }, whenEmpty);
    const headRow = h("tr", { role: "row" });
    for (const column of columns) headRow.append(this.heading(column, onSort));
    // The roles stay when rows are laid out as blocks.
    const table = h(
      "table",
      { role: "table", class: "data" },
      h("caption", {}, caption),
      h("thead", { role: "rowgroup" }, headRow),
      this.body,
    );
    this.element = h(
      "div",
      { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
      table,
      this.empty,
    );
    if (order) this.showOrder(order);
    let width = 0;
    new ResizeObserver(() => {
      // The height follows the rows.
      if (this.element.clientWidth !== width) this.layOut(true);
      width = this.element.clientWidth;
    }).observe(this.element);
  }

  private heading(column: TableColumn<Row>, onSort: Options<Row>["onSort"]): HTMLElement {
    const attributes = { role: "columnheader", scope: "col", class: column.isNumber ? "number" : undefined };
    const heading = h("th", attributes);
    if (column.isSortable && onSort) {
      const sort = h("button", { type: "button", class: "sort" }, column.title, icon("down"));
      sort.addEventListener("click", () => onSort(column));
      heading.append(sort);
    } else if (column.title) {
      heading.append(column.title);
    } else {
      heading.append(h("span", { class: "hidden-text" }, "Actions"));
    }
    this.headings.set(column.id, heading);
    return heading;
  }

  /** Where the table does not fit, its rows become blocks, until there is more room. */
  private layOut(hasOtherWidth: boolean): void {
    if (hasOtherWidth) this.element.classList.remove("blocks");
    const { clientWidth, scrollWidth } = this.element;
    if (scrollWidth > clientWidth) this.element.classList.add("blocks");
  }

  showOrder(order: Order): void {
    for (const [id, heading] of this.headings) {
      const direction = order.isDescending ? "descending" : "ascending";
      setAttribute(heading, "aria-sort", id === order.column ? direction : undefined);
    }
  }

  update(rows: readonly Row[]): void {
    const focused = document.activeElement;
    const keys = new Set(rows.map((row) => row.key));
    for (const [key, { element }] of this.rows) {
      if (keys.has(key)) continue;
      element.remove();
      this.rows.delete(key);
    }
    rows.forEach((row, place) => {
      const known = this.rows.get(row.key) ?? this.newRow(row.key);
      if (known.element.className !== (row.classes ?? "")) known.element.className = row.classes ?? "";
      known.update(row);
      const here = this.body.children[place];
      if (here !== known.element) this.body.insertBefore(known.element, here ?? null);
    });
    this.empty.hidden = rows.length > 0;
    this.layOut(false);
    // An element that is moved loses the focus.
    if (focused instanceof HTMLElement && focused !== document.activeElement && this.body.contains(focused)) {
      focused.focus({ preventScroll: true });
    }
  }

  private newRow(key: string): { element: HTMLElement; update: (row: Row) => void } {
    const element = h("tr", { role: "row", "data-key": key });
    const updates = this.columns.map((column) => {
      const cell = column.isHeading
        ? h("th", { role: "rowheader", scope: "row" })
        : h("td", { role: "cell", "data-label": column.title });
      cell.classList.toggle("number", column.isNumber === true);
      cell.classList.toggle("wide", column.isWide === true);
      element.append(cell);
      return column.fill(cell);
    });
    const known = {
      element,
      update: (row: Row) => {
        for (const update of updates) update(row);
      },
    };
    this.rows.set(key, known);
    return known;
  }
}
