// llama.cpp's tokens of some texts: node llama_tokens.mjs BINARIES MODEL JSON-LIST
import { createRequire } from "node:module";
import { join } from "node:path";

const [binaries, file, texts] = process.argv.slice(2);
const llama = createRequire(import.meta.url)(join(binaries, "llama-addon.node"));
llama.setLogger(() => {});
llama.loadBackends(binaries);
await llama.init();
const model = new llama.AddonModel(file, { addonExports: llama, vocabOnly: true });
if (!(await model.init())) throw new Error(`${file} does not load`);
const begin = model.shouldPrependBosToken() ? [model.tokenBos()] : [];
const tokens = (text) => [...begin, ...model.tokenize(text, true)];
console.log(JSON.stringify(JSON.parse(texts).map(tokens)));
process.exit(0); // its threads would linger
