// What a filled-in form changes in the settings of a link.

import { rateOption, sizeOption } from "./format.ts";
import type { Link, LinkChange } from "./types.ts";

/** The settings of a link as texts of a form. */
export interface LinkForm {
  tier: string;
  metered: boolean;
  up: string;
  down: string;
  quota: string;
  /** The status does not have the configured values of these: empty means that they stay. */
  weight: string;
  pipes: string;
  transport: string;
  quotaReset: boolean;
}

export function formOf(link: Link): LinkForm {
  return {
    tier: link.tier,
    metered: link.metered ?? false,
    up: rateOption(link.up_cap_bps),
    down: rateOption(link.down_cap_bps),
    quota: sizeOption(link.quota_bytes),
    weight: "",
    pipes: "",
    transport: "",
    quotaReset: false,
  };
}

/** The settings that differ from those of the link. An emptied limit is no limit. */
export function changeOf(link: Link, filledIn: LinkForm): LinkChange {
  const now = formOf(link);
  const change: LinkChange = {};
  if (filledIn.tier !== now.tier) change.tier = filledIn.tier;
  if (filledIn.metered !== now.metered) change.metered = filledIn.metered;
  for (const key of ["up", "down", "quota"] as const) {
    const value = filledIn[key].trim() || "none";
    if (value !== now[key]) change[key] = value;
  }
  for (const key of ["weight", "pipes", "transport"] as const) {
    const value = filledIn[key].trim();
    if (value !== "") change[key] = value;
  }
  if (filledIn.quotaReset) change["quota-reset"] = true;
  return change;
}

/** The change as sentences, one a setting: before and after. */
export function describeChange(link: Link, change: LinkChange): string[] {
  const now: Record<string, string> = { ...texts(formOf(link)), weight: String(link.weight ?? 1) };
  return Object.entries(change).map(([key, value]) => {
    if (key === "quota-reset") return "quota: count this month from 0 again";
    const before = now[key];
    const after = typeof value === "boolean" ? yesOrNo(value) : value;
    return before ? `${key}: ${before} → ${after}` : `${key}: ${after}`;
  });
}

/** What the person should know before confirming; `undefined` if nothing. */
export function warningOf(link: Link, change: LinkChange, others: readonly Link[]): string | undefined {
  const isLastWorking = !others.some((other) => other.name !== link.name && other.state === "up");
  if (change.tier === "never" && isLastWorking) {
    return `No other link carries data now: without ${link.name} the tunnel stands still.`;
  }
  if (change.tier === "never") return `All traffic leaves ${link.name}.`;
  return undefined;
}

/** The same change on the command line. */
export function commandOf(link: Link, change: LinkChange): string {
  const options = Object.entries(change).map(([key, value]) => {
    if (key === "quota-reset") return "--quota-reset";
    return `--${key} ${typeof value === "boolean" ? yesOrNo(value) : value}`;
  });
  return `mpvpn link set ${link.name} ${options.join(" ")}`;
}

function texts(form: LinkForm): Record<string, string> {
  const { tier, metered, up, down, quota, pipes, transport } = form;
  return { tier, metered: yesOrNo(metered), up, down, quota, pipes, transport };
}

function yesOrNo(value: boolean): string {
  return value ? "yes" : "no";
}
