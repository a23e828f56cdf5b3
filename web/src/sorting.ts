// Order, search and pages of lists.

export interface Order {
  column: string;
  isDescending: boolean;
}

/** A value to sort by; unknown ones come last in both directions. */
export type SortValue = string | number | undefined;

const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

/** A sorted copy; equal rows keep their order. */
export function sorted<Row>(
  rows: readonly Row[],
  sortValue: (row: Row) => SortValue,
  isDescending: boolean,
): Row[] {
  const direction = isDescending ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [left, right] = [sortValue(a), sortValue(b)];
    if (left === undefined || right === undefined)
      return Number(left === undefined) - Number(right === undefined);
    if (typeof left === "number" && typeof right === "number") return direction * (left - right);
    return direction * collator.compare(String(left), String(right));
  });
}

/** The order after a click on a column: a second click reverses it; numbers begin with the largest. */
export function nextOrder(now: Order, column: string, isNumber: boolean): Order {
  if (now.column === column) return { column, isDescending: !now.isDescending };
  return { column, isDescending: isNumber };
}

/** Whether one of the texts contains each of the words of `find`, in any case. */
export function matches(find: string, texts: readonly (string | undefined)[]): boolean {
  const all = texts.join(" ").toLowerCase();
  return find
    .toLowerCase()
    .split(/\s+/)
    .every((word) => all.includes(word));
}

export interface Page {
  offset: number;
  /** Pages in all, at least 1. */
  pages: number;
  /** Number of this page, from 1. */
  number: number;
}

/** The page at `offset` of a list, or the last one if the list has become shorter. */
export function pageAt(offset: number, count: number, total: number): Page {
  const pages = Math.max(1, Math.ceil(total / count));
  const number = Math.min(Math.floor(Math.max(0, offset) / count) + 1, pages);
  return { offset: (number - 1) * count, pages, number };
}
