// Making and updating elements. Text always goes in as text, never as HTML.

type Attributes = Record<string, string | boolean | undefined>;
type Child = Node | string | undefined;

/** An element with attributes (`true`: present without a value, `false`: absent) and children. */
export function h<Tag extends keyof HTMLElementTagNameMap>(
  tag: Tag,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[Tag] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  element.append(...children.filter((child) => child !== undefined));
  return element;
}

/** Sets an attribute if it differs: writing the same value again would make browsers work. */
export function setAttribute(element: Element, name: string, value: string | boolean | undefined): void {
  if (value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== (value === true ? "" : value)) {
    element.setAttribute(name, value === true ? "" : value);
  }
}

export function setText(node: Node, text: string): void {
  if (node.textContent !== text) node.textContent = text;
}

export function setHidden(element: HTMLElement, isHidden: boolean): void {
  if (element.hidden !== isHidden) element.hidden = isHidden;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag: string, attributes: Record<string, string>, ...children: Node[]): SVGElement {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const ICONS = {
  check: "M3.5 8.5l3 3 6-7",
  cross: "M4 4l8 8M12 4l-8 8",
  pause: "M5.5 3.5v9M10.5 3.5v9",
  slash: "M12.5 3.5l-9 9",
  dots: "M3 8h.01M8 8h.01M13 8h.01",
  right: "M6 3.5l4.5 4.5L6 12.5",
  down: "M8 3v9M4 8.5L8 12.5l4-4",
  up: "M8 13V4M4 7.5L8 3.5l4 4",
  shield: "M8 1.8l5 1.8v4c0 3.2-2 5.5-5 6.6-3-1.1-5-3.4-5-6.6v-4z",
  alert: "M8 2L14.5 13.5H1.5zM8 6.5v3M8 11.7h.01",
} as const;

export type IconName = keyof typeof ICONS;

/** A decorative icon: the text beside it says the same. */
export function icon(name: IconName): SVGElement {
  return svg(
    "svg",
    { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true", focusable: "false" },
    svg("path", { d: ICONS[name] }),
  );
}

export function button(text: string, onClick: () => void, attributes: Attributes = {}): HTMLButtonElement {
  const element = h("button", { type: "button", ...attributes }, text);
  element.addEventListener("click", onClick);
  return element;
}

/** A section with a heading, and what stands beside the heading. */
export function card(title: string, id: string, beside: Child[], ...children: Child[]): HTMLElement {
  const heading = h("h2", { id: `${id}-title` }, title);
  return h(
    "section",
    { class: "card", id, "aria-labelledby": `${id}-title` },
    h("div", { class: "card-head" }, heading, ...beside),
    ...children,
  );
}
