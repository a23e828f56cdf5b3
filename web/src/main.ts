// The page of the dashboard: logs in, shows the view of the daemon's role, and keeps it up to date.

import { Announcer } from "./announcer.ts";
import { isFromDaemon, loggedIn, logIn, logOut, RefusedError } from "./api.ts";
import { StateBadge } from "./cells.ts";
import { ClientView } from "./client_view.ts";
import { button, h, icon, setAttribute, setHidden, setText, svg } from "./dom.ts";
import { formatDuration } from "./format.ts";
import { LiveStream } from "./live.ts";
import { ServerView } from "./server_view.ts";
import type { DaemonEvent, LoggedIn, Status } from "./types.ts";
import type { View } from "./view.ts";

/** A page that nobody sees for this long (ms) ends its stream, so that the daemon has no work with it. */
const UNSEEN_MS = 60_000;

/** The code of a log-in link, which at once leaves the address bar and the history of the browser. */
function takeLogInCode(): string | undefined {
  const code = /^#login=(.+)$/.exec(location.hash)?.[1];
  if (location.hash) history.replaceState(null, "", location.pathname);
  return code === undefined ? undefined : decodeURIComponent(code);
}

class Page {
  private readonly announcer = new Announcer();
  private readonly state = new StateBadge();
  private readonly uptime = h("span", { class: "note" });
  private readonly banner = h("p", { class: "banner", role: "alert", hidden: true });
  private readonly notes = h("ul", { class: "notes", hidden: true });
  private readonly main = h("main", { id: "main" });
  private readonly pause: HTMLButtonElement;
  private readonly view: View;
  private readonly stream: LiveStream;
  private isPaused = false;
  private isAway = false;
  private isOver = false;
  private lastUptime = 0;
  private unseen: number | undefined;

  constructor(session: LoggedIn) {
    this.stream = new LiveStream({
      onStatus: (status) => this.onStatus(status),
      onEvent: (event) => this.onEvent(event),
      onConnected: (hasMissed) => void this.onConnected(hasMissed),
      onAway: () => this.onAway(),
      onEnded: () => this.end("The log-in has ended."),
    });
    this.view =
      session.role === "client"
        ? new ClientView(this.announcer)
        : new ServerView(this.announcer, session.users ?? true, () =>
            this.stream.start(this.view.liveQuery()),
          );
    this.pause = button("Pause", () => this.setPaused(!this.isPaused), { "aria-pressed": "false" });
    const leave = button("Log out", () => void this.leave());
    const name = h("span", { class: "role" }, `${session.role}${session.name ? ` ${session.name}` : ""}`);
    const version = h("span", { class: "note" }, `mpvpn ${session.version}`);
    document.title = `${session.name || session.role} – mpvpn`;
    this.main.append(
      h("h1", { class: "hidden-text" }, `mpvpn ${session.role}`),
      this.banner,
      this.view.element,
    );
    document.body.replaceChildren(
      h("a", { class: "skip", href: "#main" }, "Skip to the content"),
      h(
        "header",
        {},
        h("span", { class: "logo" }, logo(), "mpvpn"),
        name,
        this.state.element,
        this.uptime,
        h("span", { class: "header-end" }, version, this.pause, leave),
      ),
      this.main,
      this.announcer.element,
    );
    document.addEventListener("visibilitychange", () => this.onVisibility());
    this.state.update("connecting");
    this.stream.start(this.view.liveQuery());
  }

  private onStatus(status: Status): void {
    if (status.uptime_s < this.lastUptime) this.announcer.say("mpvpn was restarted");
    this.lastUptime = status.uptime_s;
    if (this.isPaused) return;
    this.state.update(status.state, status.verdict);
    setText(this.uptime, `for ${formatDuration(status.uptime_s)}`);
    this.showNotes(status.notes ?? []);
    this.view.onStatus(status);
  }

  private showNotes(notes: readonly string[]): void {
    if (notes.length !== this.notes.children.length || notes.join("") !== this.notes.textContent) {
      this.notes.replaceChildren(...notes.map((note) => h("li", {}, note)));
    }
    setHidden(this.notes, notes.length === 0);
  }

  private onEvent(event: DaemonEvent): void {
    this.view.onEvent(event);
  }

  private async onConnected(hasMissed: boolean): Promise<void> {
    if (this.isAway) {
      this.isAway = false;
      setHidden(this.banner, true);
      this.announcer.say("mpvpn answers again");
    }
    document.body.classList.remove("away");
    if (!hasMissed) return;
    try {
      await this.view.load();
    } catch (error) {
      // The stream notices the same, and loads again when it is back.
      if (!isFromDaemon(error)) throw error;
    }
  }

  private onAway(): void {
    this.isAway = true;
    this.state.update("reconnecting");
    document.body.classList.add("away");
    this.show(
      "mpvpn does not answer: it was stopped or restarts. This page reconnects by itself; until then it shows the last values.",
    );
  }

  private show(text: string): void {
    setText(this.banner, text);
    setHidden(this.banner, false);
  }

  private setPaused(isPaused: boolean): void {
    this.isPaused = isPaused;
    setAttribute(this.pause, "aria-pressed", String(isPaused));
    setText(this.pause, isPaused ? "Resume" : "Pause");
  }

  private onVisibility(): void {
    clearTimeout(this.unseen);
    if (this.isOver) return;
    if (document.visibilityState === "hidden") {
      this.unseen = window.setTimeout(() => this.stream.stop(), UNSEEN_MS);
    } else if (!this.stream.isRunning) {
      this.stream.start(this.view.liveQuery());
    }
  }

  private async leave(): Promise<void> {
    try {
      await logOut();
      this.end("You are logged out.");
    } catch (error) {
      if (!isFromDaemon(error)) throw error;
      this.show(error.message);
    }
  }

  private end(reason: string): void {
    this.isOver = true;
    this.stream.stop();
    showLogIn(reason);
  }
}

function logo(): SVGElement {
  const path = svg("path", { d: "M4 8c10 0 8 8 24 8M4 24c10 0 8-8 24-8M4 16h24" });
  return svg("svg", { class: "logo-image", viewBox: "0 0 32 32", "aria-hidden": "true" }, path);
}

/** Says how to log in, and why it is needed. */
function showLogIn(reason: string, isFailure = false): void {
  document.title = "mpvpn – log in";
  document.body.classList.remove("away");
  document.body.replaceChildren(
    h(
      "main",
      { class: "log-in" },
      h("h1", {}, logo(), "mpvpn"),
      h(
        "p",
        { class: isFailure ? "banner bad" : "banner", role: "alert" },
        isFailure ? icon("alert") : undefined,
        reason,
      ),
      h("p", {}, "For a link that logs in once, run this on the machine, as root:"),
      h("pre", { tabindex: "0" }, "mpvpn dashboard"),
      h("p", { class: "note" }, "Where several clients or servers run, name one with --name."),
    ),
  );
}

async function begin(): Promise<void> {
  const code = takeLogInCode();
  try {
    if (code !== undefined) await logIn(code);
    new Page(await loggedIn());
  } catch (error) {
    if (error instanceof RefusedError && error.status === 401) {
      showLogIn("Nobody is logged in here.");
    } else {
      showLogIn(error instanceof Error ? error.message : String(error), true);
    }
  }
}

// A further link in the same tab only changes the fragment.
window.addEventListener("hashchange", () => location.reload());
void begin();
