// What a server shows: its sessions with their paths, its users, its traffic by class.

import type { Announcer } from "./announcer.ts";
import { h } from "./dom.ts";
import { EventsCard } from "./events_card.ts";
import { FlowsCard } from "./flows_card.ts";
import { formatRate, plural } from "./format.ts";
import { ForwardsCard } from "./forwards_card.ts";
import { describe } from "./marks.ts";
import { SeriesNumbers } from "./patterns.ts";
import { RatesCard } from "./rates_card.ts";
import { withTraffic } from "./series.ts";
import { SessionsCard } from "./sessions_card.ts";
import { Tile, tiles } from "./tiles.ts";
import type { DaemonEvent, Rates, Status, User } from "./types.ts";
import { UsersCard } from "./users_card.ts";
import type { View } from "./view.ts";

export class ServerView implements View {
  readonly element: HTMLElement;
  private readonly down = new Tile("Down", "rate");
  private readonly up = new Tile("Up", "rate");
  private readonly sessionCount = new Tile("Sessions");
  private readonly userCount = new Tile("Users");
  private readonly rates: RatesCard;
  private readonly sessions: SessionsCard;
  /** Left out at a server without authentication. */
  private readonly users: UsersCard | undefined;
  private readonly flows = new FlowsCard("server");
  private readonly forwards = new ForwardsCard();
  private readonly events = new EventsCard();
  private readonly announcer: Announcer;

  /** `onQuery` is called when the live stream has to start anew with other parameters. */
  constructor(announcer: Announcer, hasUsers: boolean, onQuery: () => void) {
    this.announcer = announcer;
    this.sessions = new SessionsCard(onQuery);
    const onUsers = (users: readonly User[]) => {
      this.sessions.onUsers(users);
      const active = users.filter((user) => user.state === "active").length;
      this.userCount.update(
        String(users.length),
        active === users.length ? "all with access" : `${active} with access`,
      );
    };
    this.users = hasUsers ? new UsersCard(onUsers) : undefined;
    this.rates = new RatesCard({
      title: "Traffic by class",
      subject: "class",
      seriesOf: (answer) => withTraffic(answer.classes ?? {}),
      numbers: new SeriesNumbers(),
      onHistory: (answer) => {
        this.events.load(answer.events);
        this.sessions.load(answer);
      },
    });
    if (!hasUsers) this.userCount.update("–", "every client is accepted");
    this.element = h(
      "div",
      { class: "view" },
      tiles(this.down, this.up, this.sessionCount, this.userCount),
      this.rates.element,
      this.sessions.element,
      ...(this.users ? [this.users.element] : []),
      this.events.element,
      this.forwards.element,
      this.flows.element,
    );
  }

  liveQuery(): URLSearchParams {
    const query = this.sessions.query();
    query.set("hz", "2");
    return query;
  }

  async load(): Promise<void> {
    await Promise.all([this.rates.load(), this.users?.read()]);
  }

  onStatus(status: Status): void {
    const total = status.total ?? {};
    this.down.update(formatRate(total.down_bps), "to the clients");
    this.up.update(formatRate(total.up_bps), "from the clients");
    const { stream, datagram, udp } = status.flows;
    const all = status.sessions_total ?? status.clients.length;
    this.sessionCount.update(String(all), plural(stream + datagram + udp, "flow"));
    this.rates.push(new Map(status.classes.map((of): [string, Rates] => [of.name, of])));
    this.sessions.onStatus(status, this.rates.now());
    this.forwards.onStatus(status);
    this.flows.onStatus(status);
  }

  onEvent(event: DaemonEvent): void {
    this.rates.onEvent(event);
    this.events.add(event);
    // Sessions of many clients come and go all the time.
    const description = describe(event);
    if (description?.severity === "bad") this.announcer.say(description.text);
  }
}
