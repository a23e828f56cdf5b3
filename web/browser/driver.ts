// Drives Chromium for the end-to-end tests of the dashboard (tests/src/chromium.rs).
//
// In: a command a line on standard input, as JSON. Out: its answer, a line of JSON: `{"ok": …}` or `{"error": "…"}`. Elements are
// found by role and accessible name, as people with screen readers find them. It ends with its input.

import { readFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import puppeteer, { type Browser, type ElementHandle, type Page } from "puppeteer-core";

/** Longest wait for an element (ms), where a command says no other. */
const ELEMENT_TIMEOUT_MS = 10_000;

interface Command {
  do: string;
  url?: string;
  role?: string;
  name?: string;
  text?: string;
  /** A selector of the part of the page that is meant. */
  inside?: string;
  timeout_ms?: number;
  path?: string;
  width?: number;
  height?: number;
  scheme?: "dark" | "light";
  axe?: string;
}

class Driver {
  private readonly browser: Browser;
  private readonly page: Page;
  /** Errors of the page, and requests to other hosts. */
  private readonly complaints: string[] = [];

  constructor(browser: Browser, page: Page) {
    this.browser = browser;
    this.page = page;
    page.on("console", (message) => {
      const { url } = message.location();
      // Browsers report each request that was refused; the page shows why.
      const isExpected = /status of 4\d\d/.test(message.text()) && url?.includes("/api/");
      const isAway = /ERR_(CONNECTION_REFUSED|INCOMPLETE_CHUNKED_ENCODING|EMPTY_RESPONSE)/.test(
        message.text(),
      );
      if (["error", "warn"].includes(message.type()) && !isExpected && !isAway) {
        this.complaints.push(`${message.type()}: ${message.text()} ${url ?? ""}`);
      }
    });
    page.on("pageerror", (error) => this.complaints.push(`uncaught: ${String(error)}`));
    page.on("request", (request) => {
      const target = new URL(request.url());
      const own = page.url().startsWith("http") ? new URL(page.url()).host : target.host;
      if (target.protocol !== "data:" && target.host !== own)
        this.complaints.push(`request to ${target.href}`);
    });
  }

  async perform(command: Command): Promise<unknown> {
    switch (command.do) {
      case "open":
        await this.page.goto(command.url ?? "", { waitUntil: "load" });
        return this.page.url();
      case "look":
        return this.look(command);
      case "wait":
        return this.waitForText(command);
      case "click":
        return (await this.find(command)).click();
      case "fill":
        return this.fill(command);
      case "select":
        await (await this.find(command)).select(command.text ?? "");
        return;
      case "press":
        await this.page.keyboard.press((command.text ?? "") as Parameters<Page["keyboard"]["press"]>[0]);
        return this.focused();
      case "text":
        return this.page.$eval(command.inside ?? "body", (element) => (element as HTMLElement).innerText);
      case "value":
        return this.page.evaluate(command.text ?? "");
      case "violations":
        return this.violations(command);
      case "screenshot":
        await this.page.evaluate(() => window.scrollTo(0, 0));
        await this.page.screenshot({ path: (command.path ?? "") as `${string}.png`, fullPage: true });
        return;
      case "complaints":
        return this.complaints.splice(0);
      default:
        throw new Error(`no such command: ${command.do}`);
    }
  }

  /** Size of the window, and dark or light. */
  private async look({ width = 1280, height = 900, scheme = "light" }: Command): Promise<void> {
    await this.page.setViewport({ width, height });
    await this.page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  }

  private async find({ role, name, inside, timeout_ms }: Command): Promise<ElementHandle> {
    const selector = `${inside ?? ""} ::-p-aria([name="${name}"][role="${role}"])`;
    const found = await this.page.waitForSelector(selector.trim(), {
      timeout: timeout_ms ?? ELEMENT_TIMEOUT_MS,
    });
    if (!found) throw new Error(`no ${role} ${name}`);
    return found;
  }

  private async fill(command: Command): Promise<void> {
    const field = await this.find(command);
    await field.click({ count: 3 });
    await field.press("Backspace");
    await field.type(command.text ?? "");
  }

  /** Waits until a text that matches is shown; answers when (unix time, ms). */
  private async waitForText({ text = "", inside = "body", timeout_ms }: Command): Promise<number> {
    const limit = timeout_ms ?? ELEMENT_TIMEOUT_MS;
    const deadline = Date.now() + limit;
    const pattern = new RegExp(text);
    for (;;) {
      const shown = await this.shownIn(inside);
      if (pattern.test(shown)) return Date.now();
      if (Date.now() > deadline) throw new Error(`not within ${limit} ms: ${text} in ${inside}:\n${shown}`);
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  }

  /** What is shown in all elements with this selector; nothing while the page loads anew. */
  private async shownIn(selector: string): Promise<string> {
    try {
      return await this.page.$$eval(selector, (all) =>
        all.map((element) => (element as HTMLElement).innerText).join("\n"),
      );
    } catch (error) {
      if (error instanceof Error && error.message.includes("Execution context was destroyed")) return "";
      throw error;
    }
  }

  private focused(): Promise<string> {
    return this.page.evaluate(() => {
      const element = document.activeElement as HTMLElement | null;
      const name =
        element?.getAttribute("aria-label") ?? element?.closest("label")?.innerText ?? element?.innerText;
      return `${element?.tagName.toLowerCase()}: ${(name ?? "").trim().slice(0, 60)}`;
    });
  }

  /** What axe-core finds. */
  private async violations({ axe }: Command): Promise<string[]> {
    await this.page.evaluate(await readFile(axe ?? "", "utf8"));
    return this.page.evaluate(async () => {
      type Found = {
        violations: { id: string; help: string; nodes: { html: string; failureSummary: string }[] }[];
      };
      const { axe } = window as unknown as { axe: { run(root: Document): Promise<Found> } };
      const { violations } = await axe.run(document);
      return violations.flatMap(({ id, help, nodes }) =>
        nodes.map(({ html, failureSummary }) => `${id}: ${help}: ${html.slice(0, 200)}: ${failureSummary}`),
      );
    });
  }

  close(): Promise<void> {
    return this.browser.close();
  }
}

const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  // Root may not use the sandbox; the tests open their own page only. The browser's own services look up no names.
  args: [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
  ],
  pipe: true,
});
const driver = new Driver(browser, await browser.newPage());
const answer = (value: object) => process.stdout.write(`${JSON.stringify(value)}\n`);
for await (const line of createInterface({ input: process.stdin })) {
  try {
    answer({ ok: (await driver.perform(JSON.parse(line) as Command)) ?? null });
  } catch (error) {
    answer({ error: error instanceof Error ? error.message : String(error) });
  }
}
await driver.close();
