// What a filled-in form changes in the settings of a user.

import { rateOption, sizeOption } from "./format.ts";
import type { User } from "./types.ts";

/** The settings of a user as texts of a form; empty means none. */
export interface UserForm {
  expires: string;
  down: string;
  up: string;
  quota: string;
  sessions: string;
}

export const EMPTY_FORM: UserForm = { expires: "", down: "", up: "", quota: "", sessions: "" };

export function userForm(user: User): UserForm {
  const orEmpty = (option: string) => (option === "none" ? "" : option);
  return {
    expires: user.expires ?? "",
    down: orEmpty(rateOption(user.down_cap_bps)),
    up: orEmpty(rateOption(user.up_cap_bps)),
    quota: orEmpty(sizeOption(user.quota_bytes)),
    sessions: user.sessions === null ? "" : String(user.sessions),
  };
}

/** The settings that differ from `before`, as `mpvpn user set` takes them: an emptied one is `none`. */
export function userChange(before: UserForm, filledIn: UserForm): Record<string, string> {
  const keys = Object.keys(before) as (keyof UserForm)[];
  const changed = keys.filter((key) => filledIn[key].trim() !== before[key]);
  return Object.fromEntries(changed.map((key) => [key, filledIn[key].trim() || "none"]));
}
