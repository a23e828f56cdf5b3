// Requests to the daemon that serves this page.

import type { FlowList, HistoryAnswer, JoinAnswer, Link, LinkChange, LoggedIn, User } from "./types.ts";

/** The daemon refused a request; the message says why and what to do next. */
export class RefusedError extends Error {
  readonly status: number;

  constructor(status: number, message: string) {
    super(message);
    this.status = status;
  }
}

/** The daemon does not answer. */
export class AwayError extends Error {}

/** Whether an error is one of the two above, and not a mistake of this page. */
export function isFromDaemon(error: unknown): error is RefusedError | AwayError {
  return error instanceof RefusedError || error instanceof AwayError;
}

/** A request takes this long at most (ms). A busy daemon answers within a second; longer, and a person waits in vain. */
const TIMEOUT_MS = 10_000;

/** The second secret of a log-in, beside the cookie: other programs of the machine see cookies of all ports. */
const TOKEN_KEY = "mpvpn-token";

/** The token of the log-in; empty without one. */
export function token(): string {
  return localStorage.getItem(TOKEN_KEY) ?? "";
}

async function request<Answer>(method: "GET" | "POST", path: string, body?: object): Promise<Answer> {
  let response: Response;
  try {
    response = await fetch(path, {
      method,
      headers: { "X-CSRF-Token": token(), ...(body && { "Content-Type": "application/json" }) },
      ...(body && { body: JSON.stringify(body) }),
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
  } catch {
    throw new AwayError("mpvpn does not answer");
  }
  if (response.status === 401) localStorage.removeItem(TOKEN_KEY);
  const answer: unknown = await response.json().catch(() => ({}));
  if (response.ok) return answer as Answer;
  const error = (answer as { error?: unknown }).error;
  throw new RefusedError(response.status, typeof error === "string" ? error : `refused (${response.status})`);
}

/** Logs in with the code of a link of `mpvpn dashboard`, which counts once. */
export async function logIn(code: string): Promise<void> {
  const { csrf } = await request<{ csrf: string }>("POST", "/api/login", { code });
  localStorage.setItem(TOKEN_KEY, csrf);
}

/** Who is logged in. Throws a RefusedError with the status 401 if nobody is. */
export const loggedIn = () => request<LoggedIn>("GET", "/api/session");

export async function logOut(): Promise<void> {
  await request<object>("POST", "/api/logout", {});
  localStorage.removeItem(TOKEN_KEY);
}

export const history = (span: number) => request<HistoryAnswer>("GET", `/api/history?span=${span}`);
export const flows = () => request<FlowList>("GET", "/api/flows");
export const users = () => request<User[]>("GET", "/api/users");
export const setLink = (link: string, set: LinkChange) => request<Link>("POST", "/api/link", { link, set });
export const addUser = (settings: Record<string, string>) =>
  request<JoinAnswer>("POST", "/api/user/add", settings);
export const changeUser = (settings: Record<string, string>) =>
  request<object>("POST", "/api/user/set", settings);
export const rotateUser = (name: string) => request<JoinAnswer>("POST", "/api/user/rotate", { name });
export const revokeUser = (name: string) => request<object>("POST", "/api/user/revoke", { name });
export const removeUser = (name: string) => request<object>("POST", "/api/user/remove", { name });
