// Bare llama.cpp: times its prompt and decode steps by node-llama-cpp's binding, as JSON.
//
// usage: node llama_cpp.mjs BINARIES MODEL THREADS PROMPT CONTEXT BATCHES STEPS
// Without a server and without sampling, as llama-bench does it: the next tokens are made up.
import { createRequire } from "node:module";
import { join } from "node:path";

const [binaries, file, ...numbers] = process.argv.slice(2);
const [threads, prompt, behind] = numbers.map(Number); // threads, tokens, tokens of context
const [sizes, steps] = [numbers[3].split(",").map(Number), Number(numbers[4])];
const llama = createRequire(import.meta.url)(join(binaries, "llama-addon.node"));
llama.setLogger(() => {});
llama.loadBackends(binaries); // the one for this processor among a dozen
await llama.init();

const mostTokens = Math.max(prompt, behind, ...sizes);
const perSequence = Math.max(prompt, behind + steps) + 1;
const model = new llama.AddonModel(file, { addonExports: llama, gpuLayers: 0, useMmap: true });
if (!(await model.init())) throw new Error(`${file} does not load`);

async function withContext(numSequences, use) {
  const context = new llama.AddonContext(model, {
    contextSize: numSequences * perSequence,
    batchSize: mostTokens,
    sequences: numSequences,
    threads: threads,
    flashAttention: true,
  });
  if (!(await context.init())) throw new Error("no context");
  context.setThreads(threads);
  const result = await use(context);
  await context.dispose();
  return result;
}

let seed = 1;
const token = () => 1000 + ((seed = (seed * 48271) % 2147483647) % 200000);

async function step(context, parts) {
  context.initBatch(parts.reduce((sum, [, , count]) => sum + count, 0));
  for (const [sequence, first, count] of parts)
    context.addToBatch(sequence, first, Uint32Array.from({ length: count }, token),
      Uint32Array.of(count - 1)); // the last one's logits
  const began = performance.now();
  await context.decodeBatch();
  return (performance.now() - began) / 1000;
}

const found = { system: llama.systemInfo(), prompt_s: [], decode_s: {} };
await withContext(1, async (context) => {
  for (let round = 0; round < 3; round++) {
    context.disposeSequence(0);
    found.prompt_s.push(await step(context, [[0, 0, prompt]]));
  }
});
for (const size of sizes)
  found.decode_s[size] = await withContext(size, async (context) => {
    const ids = [...Array(size).keys()];
    for (const id of ids) await step(context, [[id, 0, behind]]);
    const times = [];
    for (let next = 0; next < steps; next++)
      times.push(await step(context, ids.map((id) => [id, behind + next, 1])));
    return times;
  });
console.log(JSON.stringify(found));
process.exit(0); // its threads would linger
