// Builds the page: web/dist/{index.html,app.js,app.css}. With --tests: the unit tests, in web/dist-test. With --browser: what
// drives a browser for the end-to-end tests, web/dist-browser/driver.mjs.
import { mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const folder = dirname(fileURLToPath(import.meta.url));
const shared = { absWorkingDir: folder, bundle: true, format: "esm", target: "es2022", logLevel: "warning" };

async function buildPage() {
  const dist = join(folder, "dist");
  const common = { ...shared, outdir: dist, minify: true, write: false };
  const scripts = await build({ ...common, entryPoints: { app: "src/main.ts" }, footer: await licences() });
  const styles = await build({ ...common, entryPoints: { app: "src/style.css" } });
  const index = { path: join(dist, "index.html"), contents: await readFile(join(folder, "src/index.html")) };
  await mkdir(dist, { recursive: true });
  let total = 0;
  for (const { path, contents } of [index, ...scripts.outputFiles, ...styles.outputFiles]) {
    // A file that stays as it is does not make cargo build the binary again.
    const before = await readFile(path).catch(() => undefined);
    if (!before?.equals(contents)) await writeFile(path, contents);
    const compressed = gzipSync(contents, { level: 9 }).length;
    total += compressed;
    process.stdout.write(`${basename(path)}: ${contents.length} bytes, ${compressed} with gzip\n`);
  }
  process.stdout.write(`the page: ${total} bytes with gzip\n`);
}

/** The licences of the libraries inside, as they demand. */
async function licences() {
  const { dependencies } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
  const texts = Object.keys(dependencies).map(async (name) => {
    const text = await readFile(join(folder, "node_modules", name, "LICENSE"), "utf8");
    return `${name}\n\n${text.trim()}`;
  });
  return { js: `/*\n${(await Promise.all(texts)).join("\n\n")}\n*/` };
}

const forNode = { ...shared, outExtension: { ".js": ".mjs" }, platform: "node", sourcemap: "inline" };

async function buildTests() {
  const dist = join(folder, "dist-test");
  await rm(dist, { recursive: true, force: true });
  const names = await readdir(join(folder, "test"));
  await build({ ...forNode, entryPoints: names.map((name) => join("test", name)), outdir: dist });
}

async function buildBrowserDriver() {
  await build({
    ...forNode,
    entryPoints: ["browser/driver.ts"],
    outdir: join(folder, "dist-browser"),
    packages: "external",
  });
}

const kinds = { "--tests": buildTests, "--browser": buildBrowserDriver };
await (kinds[process.argv[2]] ?? buildPage)();
