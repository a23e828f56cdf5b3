// The dialog that changes the settings of a link.

import { setLink } from "./api.ts";
import { Dialog, field, paragraph } from "./dialog.ts";
import { h } from "./dom.ts";
import { changeOf, commandOf, describeChange, formOf, type LinkForm, warningOf } from "./link_changes.ts";
import type { Link } from "./types.ts";

const TIERS = [
  ["primary", "primary: always"],
  ["overflow", "overflow: while primary links are full"],
  ["backup", "backup: while no other link works"],
  ["never", "never"],
] as const;
type Choice = readonly [value: string, title: string];
const STAYS: Choice = ["", "as it is"];
const TRANSPORTS: Choice[] = [
  STAYS,
  ["auto", "auto"],
  ["quic", "quic: over UDP"],
  ["tcp", "tcp: inside TCP"],
];
const PIPES: Choice[] = [
  STAYS,
  ["auto", "auto"],
  ...Array.from({ length: 8 }, (_, i): Choice => [`${i + 1}`, `${i + 1}`]),
];

/** Asks for the settings, then for a confirmation, and sets them. */
export function openLinkDialog(link: Link, links: readonly Link[]): void {
  const form = new LinkFields(formOf(link), link);
  const fill = {
    title: `Change ${link.name}`,
    content: [form.element],
    action: "Review",
    act: (dialog: Dialog) => {
      const change = changeOf(link, form.read());
      if (Object.keys(change).length === 0) {
        dialog.refuse("Nothing differs from the settings now.");
        return false;
      }
      const warning = warningOf(link, change, links);
      dialog.ask({
        title: `Change ${link.name}?`,
        content: [
          h("ul", { class: "changes" }, ...describeChange(link, change).map((text) => h("li", {}, text))),
          ...(warning ? [h("p", { class: "warning" }, warning)] : []),
          paragraph(
            "It counts until the client ends; the configuration file stays as it is. The same by command:",
          ),
          h("pre", { tabindex: "0" }, commandOf(link, change)),
        ],
        action: "Change it",
        isDestructive: warning !== undefined,
        act: async () => {
          await setLink(link.name, change);
          return true;
        },
      });
      return false;
    },
  };
  new Dialog(fill);
}

class LinkFields {
  readonly element: HTMLElement;
  private readonly tier: HTMLSelectElement;
  private readonly metered = h("input", { type: "checkbox" });
  private readonly up: HTMLInputElement;
  private readonly down: HTMLInputElement;
  private readonly quota: HTMLInputElement;
  private readonly quotaReset = h("input", { type: "checkbox" });
  private readonly weight = h("input", { inputmode: "numeric", autocomplete: "off" });
  private readonly pipes = choice(PIPES, "");
  private readonly transport = choice(TRANSPORTS, "");

  constructor(now: LinkForm, link: Link) {
    this.tier = choice(TIERS, now.tier);
    this.metered.checked = now.metered;
    this.up = h("input", { value: now.up, autocomplete: "off", spellcheck: "false" });
    this.down = h("input", { value: now.down, autocomplete: "off", spellcheck: "false" });
    this.quota = h("input", { value: now.quota, autocomplete: "off", spellcheck: "false" });
    this.weight.placeholder = String(link.weight ?? 1);
    const hasQuota = link.quota_bytes !== undefined;
    this.element = h(
      "div",
      { class: "fields" },
      field("When it is used", this.tier),
      field("Limit down", this.down, "as in 50mbit, or none"),
      field("Limit up", this.up, "as in 20mbit, or none"),
      field("Quota a month", this.quota, "as in 50GB, or none"),
      field("Pipes", this.pipes, "paths over the link, each from its own UDP port"),
      field("Transport", this.transport),
      field("Weight", this.weight, "1 to 1000, for the scheduler weighted"),
      h("label", { class: "check" }, this.metered, h("span", {}, "Traffic on it costs money")),
      hasQuota
        ? h("label", { class: "check" }, this.quotaReset, h("span", {}, "Count the quota from 0 again"))
        : undefined,
    );
  }

  read(): LinkForm {
    return {
      tier: this.tier.value,
      metered: this.metered.checked,
      up: this.up.value,
      down: this.down.value,
      quota: this.quota.value,
      weight: this.weight.value,
      pipes: this.pipes.value,
      transport: this.transport.value,
      quotaReset: this.quotaReset.checked,
    };
  }
}

function choice(values: readonly Choice[], now: string): HTMLSelectElement {
  return h(
    "select",
    {},
    ...values.map(([value, title]) => h("option", { value, selected: value === now }, title)),
  );
}
