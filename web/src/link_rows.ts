// Rows of the table of links: each link, and its paths below it if they are shown.

import { rateOption } from "./format.ts";
import type { Link, Path, Rates, Status } from "./types.ts";

export interface LinkRow {
  key: string;
  classes: string;
  isLink: boolean;
  /** The link, also of a path. */
  link: string;
  name: string;
  details: string;
  state: string;
  down: number | undefined;
  up: number | undefined;
  /** Percent of the traffic of all links. */
  share: number | undefined;
  rtt: number | undefined;
  jitter: number | undefined;
  loss: number | undefined;
  reason: string;
  /** Number of paths of a link. */
  paths: number;
  quota?: { used: number; of: number };
}

export function linkRows(status: Status, isOpen: (link: string) => boolean): LinkRow[] {
  const total = status.links.reduce((sum, link) => sum + bothDirections(link), 0);
  return status.links.flatMap((link) => {
    const paths = status.paths.filter((path) => path.link === link.name);
    return [
      linkRow(link, paths, total),
      ...(isOpen(link.name) ? paths.map((path) => pathRow(path, total)) : []),
    ];
  });
}

/** Paths of a class that sleeps have no round-trip time, and so no values; those of a path that is down are of before. */
export function isMeasured(path: Path): boolean {
  return path.state !== "down" && path.rtt_ms > 0;
}

/** The loss (percent), if the path works and anything was sent that could be lost. */
function lossOf(path: Path): number | undefined {
  return isMeasured(path) && path.recent_packets > 0 ? path.loss_pct : undefined;
}

function bothDirections({ down_bps = 0, up_bps = 0 }: Rates): number {
  return down_bps + up_bps;
}

function shareOf(rates: Rates, total: number): number | undefined {
  return total > 0 ? (100 * bothDirections(rates)) / total : undefined;
}

function linkRow(link: Link, paths: readonly Path[], total: number): LinkRow {
  const working = paths.filter(isMeasured);
  const lost = paths.map(lossOf).filter((loss) => loss !== undefined);
  const quickest = working.reduce<Path | undefined>(
    (best, path) => (best && best.rtt_ms <= path.rtt_ms ? best : path),
    undefined,
  );
  const { quota_bytes, quota_used_bytes } = link;
  return {
    key: `link ${link.name}`,
    classes: link.state === "down" ? "fails" : "",
    isLink: true,
    link: link.name,
    name: link.name,
    details: linkDetails(link),
    state: link.state,
    down: link.down_bps,
    up: link.up_bps,
    share: shareOf(link, total),
    rtt: quickest?.rtt_ms,
    jitter: quickest?.jitter_ms,
    loss: lost.length > 0 ? Math.max(...lost) : undefined,
    reason: [link.reason, link.pipes_reason].filter(Boolean).join("; "),
    paths: paths.length,
    ...(quota_bytes !== undefined && { quota: { used: quota_used_bytes ?? 0, of: quota_bytes } }),
  };
}

function linkDetails(link: Link): string {
  const limits = [
    link.down_cap_bps === undefined ? "" : `≤ ${rateOption(link.down_cap_bps)} down`,
    link.up_cap_bps === undefined ? "" : `≤ ${rateOption(link.up_cap_bps)} up`,
  ];
  return [link.tier, link.metered ? "metered" : "", ...limits].filter(Boolean).join(" · ");
}

/** A path of a client in the words of its name without its link, or of a client at a server. */
export function pathRow(path: Path, total: number): LinkRow {
  return {
    key: `path ${path.id}`,
    classes: path.state === "down" ? "path fails" : "path",
    isLink: false,
    link: path.link,
    name: path.id,
    details: path.transport && path.transport !== "quic" ? `inside ${path.transport}` : "",
    state: path.state,
    down: path.down_bps,
    up: path.up_bps,
    share: shareOf(path, total),
    rtt: isMeasured(path) ? path.rtt_ms : undefined,
    jitter: isMeasured(path) ? path.jitter_ms : undefined,
    loss: lossOf(path),
    reason: path.reason || `${path.local} to ${path.remote}`,
    paths: 0,
  };
}
