// What the page of each role can do.

import type { DaemonEvent, Status } from "./types.ts";

export interface View {
  readonly element: HTMLElement;
  /** Parameters of the live stream. */
  liveQuery(): URLSearchParams;
  /** Reads what the daemon remembers. */
  load(): Promise<void>;
  onStatus(status: Status): void;
  onEvent(event: DaemonEvent): void;
}
