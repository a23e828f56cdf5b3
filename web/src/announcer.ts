// What screen readers say without being asked.

import { h, setText } from "./dom.ts";

/** Changes within this time (ms) are said together. */
const GATHERING_MS = 1000;
/** Changes said at once; of more, the number is said. */
const MAX_SAID = 3;

export class Announcer {
  readonly element = h("div", { class: "hidden-text", "aria-live": "polite", role: "status" });
  private gathered: string[] = [];
  private timer: number | undefined;

  say(text: string): void {
    if (!this.gathered.includes(text)) this.gathered.push(text);
    this.timer ??= window.setTimeout(() => {
      const more = this.gathered.length - MAX_SAID;
      const said = this.gathered.slice(-MAX_SAID);
      setText(this.element, [...said, ...(more > 0 ? [`and ${more} more events`] : [])].join(". "));
      this.gathered = [];
      this.timer = undefined;
    }, GATHERING_MS);
  }
}
