// Adds the packages that are in the page to a bill of materials (CycloneDX) of the binary: node add-to-sbom.mjs FILE

import { readFileSync, writeFileSync } from "node:fs";

const file = process.argv[2];
if (file === undefined) throw new Error("usage: node add-to-sbom.mjs FILE");
const lock = JSON.parse(readFileSync(new URL("package-lock.json", import.meta.url), "utf8"));
const bill = JSON.parse(readFileSync(file, "utf8"));

const prefix = "node_modules/";
const components = Object.entries(lock.packages)
  // Tools that build and test the page are not in it.
  .filter(([path, about]) => path.startsWith(prefix) && !about.dev)
  .map(([path, about]) => {
    const name = path.slice(path.lastIndexOf(prefix) + prefix.length);
    const purl = `pkg:npm/${name.replace("@", "%40")}@${about.version}`;
    const [algorithm, digest] = about.integrity.split("-", 2);
    return {
      type: "library",
      "bom-ref": purl,
      name,
      version: about.version,
      scope: "required",
      hashes: [
        {
          alg: algorithm.toUpperCase().replace("SHA", "SHA-"),
          content: Buffer.from(digest, "base64").toString("hex"),
        },
      ],
      licenses: [{ expression: about.license }],
      purl,
    };
  });

bill.components = [...(bill.components ?? []), ...components];
const root = bill.metadata?.component?.["bom-ref"];
const own = bill.dependencies?.find((one) => one.ref === root);
if (own) own.dependsOn = [...(own.dependsOn ?? []), ...components.map((one) => one.purl)];
bill.dependencies?.push(...components.map((one) => ({ ref: one.purl })));
writeFileSync(file, `${JSON.stringify(bill, null, 2)}\n`);
