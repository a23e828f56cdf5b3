// The dialogs that add users and change their access.

import { encode } from "uqr";
import { addUser, removeUser, revokeUser, rotateUser } from "./api.ts";
import { Dialog, field, paragraph } from "./dialog.ts";
import { button, h, svg } from "./dom.ts";
import type { JoinAnswer } from "./types.ts";

const MAX_SESSIONS_HINT = "clients at once; 64 if empty";

/** Asks for a new user's settings, adds the user, and shows the join link. `onDone` is called after a change. */
export function openAddDialog(onDone: () => void): void {
  const input = (attributes = {}) => h("input", { autocomplete: "off", spellcheck: "false", ...attributes });
  const [name, down, up, quota] = [input({ required: true, maxlength: "64" }), input(), input(), input()];
  const [expires, sessions] = [input(), input({ inputmode: "numeric" })];
  const fields = h(
    "div",
    { class: "fields" },
    field("Name", name),
    field("Access ends", expires, "as in 90d or 2027-01-31; empty: never"),
    field("Limit down", down, "as in 50mbit; empty: none"),
    field("Limit up", up, "as in 20mbit; empty: none"),
    field("Quota a month", quota, "as in 50GB; empty: none"),
    field("Sessions", sessions, MAX_SESSIONS_HINT),
  );
  new Dialog({
    title: "Add a user",
    content: [fields],
    action: "Add",
    act: async (dialog) => {
      const user = name.value.trim();
      if (user === "") {
        name.focus();
        dialog.refuse("A user needs a name.");
        return false;
      }
      const count = sessions.value.trim();
      if (count !== "" && !/^[1-9]\d*$/.test(count)) {
        sessions.focus();
        dialog.refuse("Sessions is a number of at least 1.");
        return false;
      }
      const texts = {
        name: user,
        up: up.value,
        down: down.value,
        quota: quota.value,
        expires: expires.value,
      };
      const given = Object.entries(texts).map(([key, value]) => [key, value.trim()] as const);
      const settings = Object.fromEntries(given.filter(([, value]) => value !== ""));
      const answer = await addUser({ ...settings, ...(count !== "" && { sessions: Number(count) }) });
      showJoinLink(dialog, `${user} can join`, answer);
      onDone();
      return false;
    },
  });
}

export function openRotateDialog(name: string, onDone: () => void): void {
  new Dialog({
    title: `New link for ${name}?`,
    content: [paragraph(`The link and the token that ${name} has now stop working, and its sessions end.`)],
    action: "Make a new link",
    isDestructive: true,
    act: async (dialog) => {
      showJoinLink(dialog, `New link for ${name}`, await rotateUser(name));
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

function showJoinLink(dialog: Dialog, title: string, answer: JoinAnswer): void {
  dialog.showResult(title, [
    paragraph(
      "The link is shown this once. It is all that a client needs, so hand it over as you would a password.",
    ),
    copyable("Join link", answer.join_link),
    copyable("On the client, as root", answer.command),
    qrCode(answer.join_link),
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
