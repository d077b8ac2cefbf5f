// Bundle the inspector into ../thunder_fn/inspect/assets. Run `npm ci && npm run build` here after a change in src/.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const out = "../thunder_fn/inspect/assets";
const packages = ["preact", "uplot"];
const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8")).version;
const license = (name) => readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim();

// What the bundle was made of: a test compares this with the files, so that nobody forgets to build.
const sources = readdirSync("src").sort();
const digest = createHash("sha256");
for (const name of sources) digest.update(name).update(readFileSync(`src/${name}`, "utf8").replaceAll("\r\n", "\n"));
const banner = `/* sources ${digest.digest("hex").slice(0, 16)}; bundles ${packages.map((name) => `${name} ${version(name)}`).join(", ")} (MIT) */`;

mkdirSync(out, { recursive: true });
await build({
  entryPoints: { inspector: "src/app.jsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "utf8",
  legalComments: "none",
  banner: { js: banner, css: banner },
});
for (const name of ["inspector.js", "inspector.css"]) {
  const text = readFileSync(`${out}/${name}`, "utf8");
  if (/<\/(script|style)/i.test(text)) throw new Error(`${name} would end its own element`);
  console.log(name, `${(text.length / 1024).toFixed(1)} KiB`);
}
writeFileSync(
  `${out}/LICENSES.txt`,
  packages.map((name) => `${name} ${version(name)}\n\n${license(name)}\n`).join("\n----\n\n"),
);
