// The users of a server, and what can be done with them.

import { isFromDaemon, RefusedError, users as readUsers } from "./api.ts";
import { Meter, stateColumn } from "./cells.ts";
import { button, card, h, setAttribute, setHidden, setText } from "./dom.ts";
import { formatBytes, plural } from "./format.ts";
import { Pager } from "./pager.ts";
import { limitsOf } from "./sessions_card.ts";
import { matches, nextOrder, type Order, type SortValue, sorted } from "./sorting.ts";
import { DataTable, type TableColumn, text } from "./table.ts";
import type { User } from "./types.ts";
import {
  openAddDialog,
  openChangeDialog,
  openRemoveDialog,
  openRevokeDialog,
  openRotateDialog,
} from "./user_dialogs.ts";

/** Pause between readings (ms): states change by quotas, dates and commands. */
const REFRESH_MS = 5000;
/** Users on a page. */
const PAGE = 25;

type UserRow = User & { key: string };

const VALUES: Record<string, (user: User) => SortValue> = {
  name: (user) => user.user,
  state: (user) => user.state,
  sessions: (user) => user.connected,
  quota: (user) => (user.quota_bytes ? (user.quota_used_bytes ?? 0) / user.quota_bytes : undefined),
  expires: (user) => user.expires ?? undefined,
};

export class UsersCard {
  readonly element: HTMLElement;
  private readonly table: DataTable<UserRow>;
  private readonly pager = new Pager("users", PAGE, () => this.draw());
  private readonly note = h("span", { class: "note" });
  private users: User[] = [];
  private order: Order = { column: "name", isDescending: false };
  private find = "";
  private timer: number | undefined;
  private readonly onUsers: (users: readonly User[]) => void;

  constructor(onUsers: (users: readonly User[]) => void) {
    this.onUsers = onUsers;
    const input = h("input", { type: "search", placeholder: "Find", "aria-label": "Find users", size: "14" });
    input.addEventListener("input", () => {
      this.find = input.value;
      this.pager.first();
      this.draw();
    });
    this.table = new DataTable({
      caption: "Users of this server",
      columns: this.columns(),
      whenEmpty: "No users.",
      order: this.order,
      onSort: (column) => {
        this.order = nextOrder(this.order, column.id, column.isNumber === true);
        this.table.showOrder(this.order);
        this.draw();
      },
    });
    const add = button("Add a user…", () => openAddDialog(() => void this.read()), { class: "primary" });
    this.element = card("Users", "users", [this.note, input, add], this.table.element, this.pager.element);
  }

  /** Reads the users now, and then again and again. */
  async read(): Promise<void> {
    clearTimeout(this.timer);
    // The log-in has ended.
    if (!this.element.isConnected) return;
    this.timer = window.setTimeout(() => void this.read(), REFRESH_MS);
    try {
      this.users = await readUsers();
      this.onUsers(this.users);
      this.draw();
    } catch (error) {
      if (!isFromDaemon(error)) throw error;
      // A daemon that is away is reported by the stream.
      if (error instanceof RefusedError) setText(this.note, error.message);
    }
  }

  private draw(): void {
    const found = this.users.filter((user) =>
      matches(this.find, [user.user, user.state, ...(user.address ?? [])]),
    );
    const sortValue = VALUES[this.order.column] ?? (() => undefined);
    this.pager.update(found.length);
    const page = sorted(found, sortValue, this.order.isDescending).slice(
      this.pager.offset,
      this.pager.offset + PAGE,
    );
    this.table.update(
      page.map((user) => ({ ...user, key: user.user, classes: user.state === "active" ? "" : "inactive" })),
    );
    setText(this.note, plural(found.length, "user"));
  }

  private columns(): TableColumn<UserRow>[] {
    const columns: TableColumn<UserRow>[] = [
      { id: "name", title: "User", isHeading: true, fill: text((user) => user.user) },
      stateColumn((user) => user.state),
      { id: "sessions", title: "Sessions", isNumber: true, fill: text(sessionsOf) },
      { id: "limits", title: "Limits", fill: text(limitsOf) },
      { id: "quota", title: "Quota this month", fill: fillQuota },
      { id: "expires", title: "Access ends", fill: text((user) => user.expires ?? "never") },
      { id: "actions", title: "", isWide: true, fill: (cell) => this.fillActions(cell) },
    ];
    return columns.map((column) => ({ ...column, isSortable: column.id in VALUES }));
  }

  private fillActions(cell: HTMLElement): (user: User) => void {
    let user: User | undefined;
    let name = "";
    const changed = () => void this.read();
    const change = button("Change…", () => user && openChangeDialog(user, changed));
    const rotate = button("New link…", () => openRotateDialog(name, changed));
    const revoke = button("Revoke…", () => openRevokeDialog(name, changed));
    const remove = button("Remove…", () => openRemoveDialog(name, changed));
    cell.append(h("span", { class: "actions" }, change, rotate, revoke, remove));
    return (row) => {
      user = row;
      name = row.user;
      setHidden(revoke, row.state === "revoked");
      setAttribute(change, "aria-label", `Change ${name}`);
      setAttribute(rotate, "aria-label", `New link for ${name}`);
      setAttribute(revoke, "aria-label", `Revoke the access of ${name}`);
      setAttribute(remove, "aria-label", `Remove ${name}`);
    };
  }
}

function sessionsOf({ connected, sessions }: User): string {
  const most = sessions === null ? "" : `at most ${sessions}`;
  return connected === undefined ? most || "–" : [String(connected), most].filter(Boolean).join(", ");
}

function fillQuota(cell: HTMLElement): (user: User) => void {
  const meter = new Meter(true);
  const none = h("span", {}, "none");
  cell.append(none, meter.element);
  return ({ quota_bytes, quota_used_bytes }) => {
    const used = quota_used_bytes ?? 0;
    setHidden(none, quota_bytes !== null);
    const words = quota_bytes === null ? "" : `${formatBytes(used)} of ${formatBytes(quota_bytes)}`;
    meter.update(quota_bytes ? (100 * used) / quota_bytes : undefined, words);
  };
}
