// The dialogs that add users and change their access.

import { encode } from "uqr";
import { addUser, changeUser, removeUser, revokeUser, rotateUser } from "./api.ts";
import { Dialog, field, paragraph } from "./dialog.ts";
import { button, h, svg } from "./dom.ts";
import type { JoinAnswer, User } from "./types.ts";
import { EMPTY_FORM, type UserForm, userChange, userForm } from "./user_changes.ts";

/** Asks for a new user's settings, adds the user, and shows how a client joins. `onDone` is called after a change. */
export function openAddDialog(onDone: () => void): void {
  const name = textInput({ required: true, maxlength: "64" });
  const fields = new UserFields(EMPTY_FORM);
  new Dialog({
    title: "Add a user",
    content: [field("Name", name), fields.element],
    action: "Add",
    act: async (dialog) => {
      const user = name.value.trim();
      if (user === "") {
        name.focus();
        dialog.refuse("A user needs a name.");
        return false;
      }
      const answer = await addUser({ name: user, ...userChange(EMPTY_FORM, fields.read()) });
      showJoining(dialog, `${user} can join`, answer);
      onDone();
      return false;
    },
  });
}

/** Asks for other settings of a user, which count for running sessions, too. */
export function openChangeDialog(user: User, onDone: () => void): void {
  const before = userForm(user);
  const fields = new UserFields(before);
  new Dialog({
    title: `Change ${user.user}`,
    content: [fields.element, paragraph("It counts at once, for sessions that run, too.")],
    action: "Change it",
    act: async (dialog) => {
      const change = userChange(before, fields.read());
      if (Object.keys(change).length === 0) {
        dialog.refuse("Nothing differs from the settings now.");
        return false;
      }
      await changeUser({ name: user.user, ...change });
      onDone();
      return true;
    },
  });
}

function textInput(attributes: Record<string, string | boolean> = {}): HTMLInputElement {
  return h("input", { autocomplete: "off", spellcheck: "false", ...attributes });
}

class UserFields {
  readonly element: HTMLElement;
  private readonly inputs: Record<keyof UserForm, HTMLInputElement>;

  constructor(now: UserForm) {
    const input = (value: string) => textInput({ value });
    this.inputs = {
      expires: input(now.expires),
      down: input(now.down),
      up: input(now.up),
      quota: input(now.quota),
      sessions: input(now.sessions),
    };
    this.element = h(
      "div",
      { class: "fields" },
      field("Limit down", this.inputs.down, "as in 50mbit; empty: none"),
      field("Limit up", this.inputs.up, "as in 20mbit; empty: none"),
      field("Quota a month", this.inputs.quota, "as in 50GB; empty: none"),
      field("Sessions at once", this.inputs.sessions, "empty: 64"),
      field("Access ends", this.inputs.expires, "as in 90d or 2027-01-31; empty: never"),
    );
  }

  read(): UserForm {
    const { expires, down, up, quota, sessions } = this.inputs;
    return {
      expires: expires.value,
      down: down.value,
      up: up.value,
      quota: quota.value,
      sessions: sessions.value,
    };
  }
}

export function openRotateDialog(name: string, onDone: () => void): void {
  new Dialog({
    title: `New link for ${name}?`,
    content: [paragraph(`The link and the token that ${name} has now stop working, and its sessions end.`)],
    action: "Make a new link",
    isDestructive: true,
    act: async (dialog) => {
      showJoining(dialog, `New link for ${name}`, await rotateUser(name));
      onDone();
      return false;
    },
  });
}

export function openRevokeDialog(name: string, onDone: () => void): void {
  new Dialog({
    title: `Revoke the access of ${name}?`,
    content: [
      paragraph(
        `All sessions of ${name} end at once. Name and settings stay; a new link gives the access back.`,
      ),
    ],
    action: "Revoke",
    isDestructive: true,
    act: async () => {
      await revokeUser(name);
      onDone();
      return true;
    },
  });
}

export function openRemoveDialog(name: string, onDone: () => void): void {
  new Dialog({
    title: `Remove ${name}?`,
    content: [paragraph(`All sessions of ${name} end at once, and its settings are gone.`)],
    action: "Remove",
    isDestructive: true,
    act: async () => {
      await removeUser(name);
      onDone();
      return true;
    },
  });
}

/** Shows how a client joins: by a link, or by a certificate where the server knows clients by these. */
function showJoining(dialog: Dialog, title: string, answer: JoinAnswer): void {
  const { join_link: link, command, guessed_address: isGuess } = answer;
  const guess =
    "The address is one of this machine. If clients reach it by another one, set `public` in the server's file.";
  dialog.showResult(title, [
    ...(link
      ? [
          paragraph(
            "The link is shown this once. It is all that a client needs, so hand it over as a password.",
          ),
          copyable("Join link", link),
        ]
      : []),
    copyable(link ? "On the client, as root" : "On the client, as root, with its certificate", command),
    ...(isGuess ? [h("p", { class: "note" }, guess)] : []),
    ...(link ? [qrCode(link)] : []),
  ]);
}

function copyable(label: string, text: string): HTMLElement {
  const copy = button("Copy", () => {
    void copyText(text).then((isCopied) => {
      copy.textContent = isCopied ? "Copied" : "Select and copy it";
    });
  });
  copy.setAttribute("aria-label", `Copy: ${label}`);
  return h(
    "div",
    { class: "copyable" },
    h("div", { class: "copyable-head" }, h("span", {}, label), copy),
    h("pre", { tabindex: "0" }, text),
  );
}

/** Copies a text. Browsers may forbid it. */
async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** The text as a QR code, dark on light in both modes, as cameras expect it. */
function qrCode(text: string): Node {
  const { data, size } = encode(text, { ecc: "L", border: 3 });
  const squares = data.flatMap((row, y) => row.map((isDark, x) => (isDark ? `M${x} ${y}h1v1h-1z` : "")));
  return svg(
    "svg",
    { class: "qr", viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": "The join link as a QR code" },
    svg("path", { d: squares.join(""), "shape-rendering": "crispEdges" }),
  );
}
