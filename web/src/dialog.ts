// Dialogs: a form or a question, what happens while the daemon works on it, and its refusal.

import { button, h, setHidden, setText } from "./dom.ts";

interface Options {
  title: string;
  content: Node[];
  /** Text of the button that acts. */
  action: string;
  /** The action takes something away. */
  isDestructive?: boolean;
  /** Acts; the dialog stays open with the reason if it fails. Answers whether the dialog closes. */
  act: (dialog: Dialog) => Promise<boolean> | boolean;
}

let dialogs = 0;

export class Dialog {
  private readonly element = h("dialog");
  private readonly form = h("form", { novalidate: true });
  private readonly heading = h("h2");
  private readonly body = h("div", { class: "dialog-body" });
  private readonly refusal = h("p", { class: "refusal", role: "alert" });
  private readonly cancel = button("Cancel", () => this.close());
  private readonly action = h("button", { type: "submit" });
  private options: Options;

  constructor(options: Options) {
    this.options = options;
    dialogs += 1;
    this.heading.id = `dialog-${dialogs}`;
    this.element.setAttribute("aria-labelledby", this.heading.id);
    const actions = h("div", { class: "dialog-actions" }, this.cancel, this.action);
    this.form.append(this.heading, this.body, this.refusal, actions);
    this.form.addEventListener("submit", (submit) => {
      submit.preventDefault();
      void this.act();
    });
    this.element.append(this.form);
    this.element.addEventListener("close", () => this.element.remove());
    this.ask(options);
    document.body.append(this.element);
    this.element.showModal();
    this.focusFirst();
  }

  /** Shows something else in the same dialog: a question about what was filled in, or a result. */
  ask(options: Options): void {
    this.options = options;
    setText(this.heading, options.title);
    this.body.replaceChildren(...options.content);
    setText(this.action, options.action);
    this.action.className = options.isDestructive ? "danger" : "primary";
    setHidden(this.refusal, true);
    if (this.element.open) this.focusFirst();
  }

  /** The action is all that is left: the result is shown. */
  showResult(title: string, content: Node[]): void {
    this.ask({ title, content, action: "Done", act: () => true });
    setHidden(this.cancel, true);
    this.action.focus();
  }

  refuse(reason: string): void {
    setText(this.refusal, reason);
    setHidden(this.refusal, false);
  }

  close(): void {
    this.element.close();
  }

  private focusFirst(): void {
    const field = this.body.querySelector<HTMLElement>("input, select");
    (field ?? this.cancel).focus();
  }

  private async act(): Promise<void> {
    setHidden(this.refusal, true);
    this.action.disabled = true;
    try {
      if (await this.options.act(this)) this.close();
    } catch (error) {
      this.refuse(error instanceof Error ? error.message : String(error));
    } finally {
      this.action.disabled = false;
    }
  }
}

/** A field of a form with its label and a hint. */
export function field(label: string, input: HTMLElement, hint?: string): HTMLElement {
  dialogs += 1;
  const id = `field-${dialogs}`;
  input.id = id;
  const hintElement = hint === undefined ? undefined : h("span", { class: "hint", id: `${id}-hint` }, hint);
  if (hintElement) input.setAttribute("aria-describedby", hintElement.id);
  return h("div", { class: "field" }, h("label", { for: id }, label), input, hintElement);
}

export function paragraph(...content: (Node | string)[]): HTMLElement {
  return h("p", {}, ...content);
}
