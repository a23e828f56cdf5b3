// What the daemon answers. Fields are those of `mpvpn status --json`, `mpvpn events --json`, `mpvpn flows --json` and
// `mpvpn user list --json`; a reader treats missing fields as unknown.

export type Role = "client" | "server";

export interface LoggedIn {
  role: Role;
  name: string;
  version: string;
  /** Whether a server has users. */
  users?: boolean;
}

/** Rates towards the client (`down_bps`) and from the client (`up_bps`), at both roles. */
export interface Rates {
  down_bps?: number;
  up_bps?: number;
}

/** Rates as this end counts them. */
export interface SentAndReceived {
  tx_bps?: number;
  rx_bps?: number;
}

export interface Status {
  role: Role;
  version: string;
  state: string;
  /** The state with its reason, as a sentence. */
  verdict?: string;
  uptime_s: number;
  notes?: string[];
  kill_switch?: "off" | "armed" | "blocking";
  addresses: string[];
  session: { server: string; user: string; resumed: number } | null;
  total?: Rates;
  classes: TrafficClass[];
  links: Link[];
  paths: Path[];
  flows: { stream: number; datagram: number; udp: number };
  clients: Client[];
  forwards?: Forward[];
  /** Number of all sessions, and of those that match what is looked for. */
  sessions_total?: number;
  sessions_found?: number;
}

/** A port that leads on to a host. */
export interface Forward {
  port: string;
  to: string;
  addresses: string[];
  tx_bytes: number;
  rx_bytes: number;
}

export interface Link extends Rates, SentAndReceived {
  name: string;
  state: "up" | "standby" | "down" | "never";
  tier: string;
  reason: string;
  addresses: string[];
  tx_bytes: number;
  rx_bytes: number;
  metered?: boolean;
  up_cap_bps?: number;
  down_cap_bps?: number;
  weight?: number;
  quota_bytes?: number;
  quota_used_bytes?: number;
  pipes?: number;
  pipes_reason?: string;
}

export interface Path extends Rates, SentAndReceived {
  id: string;
  class: string;
  link: string;
  pipe?: number;
  transport?: string;
  local: string;
  remote: string;
  state: "active" | "standby" | "down";
  reason: string;
  rtt_ms: number;
  min_rtt_ms: number;
  jitter_ms: number;
  loss_pct: number;
  /** Packets sent in the last 10 s: without any, the loss is unknown. */
  recent_packets: number;
  mtu: number;
}

export interface TrafficClass extends Rates, SentAndReceived {
  name: string;
  lane: string;
  cc: string;
  scheduler: string;
  queue_ms: number;
  drops: number;
  state?: string;
  reason?: string;
  rtt_ms?: number;
  loss_pct?: number;
  order?: { fec?: { percent?: number } };
}

export interface Client extends Rates, SentAndReceived {
  /** The same while the session lives. */
  id: string;
  user: string;
  addresses: string[];
  connected_s: number;
  tx_bytes: number;
  rx_bytes: number;
  paths: Path[];
}

export interface Flow {
  protocol: string;
  user?: string;
  class?: string;
  from?: string;
  to: string;
  lane: string;
  why?: string;
  state?: string;
  up_bytes: number;
  down_bytes: number;
  age_s: number;
  idle_s: number;
}

export interface FlowList {
  flows: Flow[];
  left_out: number;
}

export interface User {
  user: string;
  state: "active" | "revoked" | "expired" | "quota-used-up";
  expires: string | null;
  address?: string[];
  sessions: number | null;
  connected?: number;
  up_cap_bps: number | null;
  down_cap_bps: number | null;
  quota_bytes: number | null;
  quota_used_bytes: number | null;
}

export interface DaemonEvent {
  number?: number;
  kind?: string;
  event?: string;
  level?: string;
  first?: string;
  last?: string;
  time_ms?: number;
  count?: number;
  detail?: boolean;
  text: string;
  link?: string;
  path?: string;
  class?: string;
  user?: string;
  address?: string;
  reason?: string;
  change?: string;
  transport?: string;
  pipes?: number;
  resumed?: boolean;
  silence_ms?: number;
  failed_ms?: number;
}

export type Values = (number | null)[];

export interface Directions {
  down_bps: Values;
  up_bps: Values;
}

export interface HistoryAnswer {
  begin_ms: number;
  step_ms: number;
  total: Directions;
  links?: Record<string, Directions & { rtt_ms?: Values; loss?: Values }>;
  classes?: Record<string, Directions>;
  sessions?: Record<string, Directions>;
  events: DaemonEvent[];
}

export interface JoinAnswer {
  /** Left out where clients have certificates. */
  join_link: string | null;
  command: string;
  /** Clients may not reach the server by the address in the link. */
  guessed_address?: boolean;
}

/** The settings of a link that `mpvpn link set` changes, with the names of its options. */
export interface LinkChange {
  tier?: string;
  metered?: boolean;
  up?: string;
  down?: string;
  weight?: string;
  quota?: string;
  pipes?: string;
  transport?: string;
  "quota-reset"?: boolean;
}
