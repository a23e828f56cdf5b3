// The stream of statuses and events, which reconnects by itself.

import { loggedIn, RefusedError, token } from "./api.ts";
import { withDirections } from "./directions.ts";
import type { DaemonEvent, Status } from "./types.ts";

export interface Listener {
  onStatus(status: Status): void;
  onEvent(event: DaemonEvent): void;
  /** The stream works (again). `hasMissed`: there was a time without one, of which the daemon may remember more. */
  onConnected(hasMissed: boolean): void;
  /** The daemon does not answer; the stream tries again. */
  onAway(): void;
  /** The log-in has ended. */
  onEnded(): void;
}

/** Pauses before the attempts to reconnect (ms), the last one again and again: a restart takes about a second. */
const PAUSES_MS = [250, 500, 1000, 2000, 4000];
/** Statuses come at least once a second. A stream that is silent for this long (ms) is dead, though its connection may not be. */
const SILENCE_MS = 5000;

export class LiveStream {
  private source: EventSource | undefined;
  private retry: number | undefined;
  private watchdog: number | undefined;
  private failures = 0;
  private hasMissed = true;
  private query = "";
  private readonly listener: Listener;

  constructor(listener: Listener) {
    this.listener = listener;
  }

  /** Starts, or starts anew with other parameters. */
  start(query: URLSearchParams): void {
    this.query = query.toString();
    this.failures = 0;
    if (!this.isRunning) this.hasMissed = true;
    this.connect();
  }

  /** Whether a stream is open, or will be tried again. */
  get isRunning(): boolean {
    return this.source !== undefined || this.retry !== undefined;
  }

  stop(): void {
    this.source?.close();
    this.source = undefined;
    clearTimeout(this.retry);
    this.retry = undefined;
    clearTimeout(this.watchdog);
  }

  private connect(): void {
    this.stop();
    // An EventSource cannot send the token as a field.
    const source = new EventSource(`/api/live?${this.query}&csrf=${encodeURIComponent(token())}`);
    this.source = source;
    this.watch(source);
    let isFirst = true;
    source.addEventListener("status", ({ data }) => {
      this.watch(source);
      if (isFirst) {
        isFirst = false;
        this.failures = 0;
        this.listener.onConnected(this.hasMissed);
        this.hasMissed = false;
      }
      const status = parse<Status>(data);
      if (status) this.listener.onStatus(withDirections(status));
    });
    source.addEventListener("event", ({ data }) => {
      this.watch(source);
      const event = parse<DaemonEvent>(data);
      if (event) this.listener.onEvent(event);
    });
    source.addEventListener("error", () => this.onFailure(source));
  }

  private watch(source: EventSource): void {
    clearTimeout(this.watchdog);
    this.watchdog = window.setTimeout(() => this.onFailure(source), SILENCE_MS);
  }

  /** An EventSource does not tell why it failed, so the daemon is asked whether the log-in still counts. */
  private async onFailure(source: EventSource): Promise<void> {
    if (source !== this.source) return;
    this.stop();
    this.hasMissed = true;
    const pause = PAUSES_MS[Math.min(this.failures, PAUSES_MS.length - 1)];
    this.failures += 1;
    const { query } = this;
    try {
      await loggedIn();
    } catch (error) {
      if (error instanceof RefusedError && error.status === 401) {
        this.listener.onEnded();
        return;
      }
      this.listener.onAway();
    }
    // Started anew meanwhile.
    if (this.source || query !== this.query) return;
    clearTimeout(this.retry);
    this.retry = window.setTimeout(() => this.connect(), pause);
  }
}

function parse<Message>(data: string): Message | undefined {
  try {
    return JSON.parse(data) as Message;
  } catch {
    return undefined;
  }
}
