// The openai and anthropic SDKs for Node, unchanged, against a running cluster.
//
// npm install openai @anthropic-ai/sdk
// pdserve up
// node tests/cluster/node_sdks.mjs [URL [MODEL]]

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url = "http://127.0.0.1:8000", model = "pdserve-demo"] = process.argv.slice(2);
// They are found from the working directory, too, as `npm install` leaves them there.
const { resolve } = createRequire(pathToFileURL(`${process.cwd()}/`));
const { default: OpenAI, toFile } = await import(pathToFileURL(resolve("openai")));
const { default: Anthropic } = await import(pathToFileURL(resolve("@anthropic-ai/sdk")));

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });

const messages = [{ role: "user", content: "Grüße! 你好 🙂" }];
const chat = { model, messages, temperature: 0, max_completion_tokens: 16 };
const message = { model, messages, max_tokens: 16 };
const schema = {
  type: "object",
  properties: { even: { type: "boolean" } },
  required: ["even"],
  additionalProperties: false,
};

async function ended(get, isOver) {
  for (const end = Date.now() + 60_000; Date.now() < end; ) {
    const found = await get();
    if (isOver(found)) return found;
    await new Promise((resume) => setTimeout(resume, 50));
  }
  throw new Error("a batch did not end");
}

async function rejected(call, kind, status) {
  const error = await call.then(
    () => assert.fail("it was accepted"),
    (error) => error,
  );
  assert.ok(error instanceof kind, `${error}`);
  assert.equal(error.status, status);
  return error;
}

const checks = {
  "openai: a chat, whole, streamed and by its helper": async () => {
    const whole = await openai.chat.completions.create(chat);
    assert.ok(whole.usage.completion_tokens > 0);
    const stream_options = { include_usage: true };
    const stream = await openai.chat.completions.create({ ...chat, stream: true, stream_options });
    let text = "";
    let usage;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
    const helped = await openai.chat.completions.stream(chat).finalChatCompletion();
    assert.equal(helped.choices[0].message.content, text);
  },
  "openai: tools that run, and a form": async () => {
    const told = [];
    const run = openai.chat.completions.runTools(
      {
        ...chat,
        max_completion_tokens: 128,
        tool_choice: { type: "function", function: { name: "tell" } },
        tools: [
          {
            type: "function",
            function: {
              name: "tell",
              parameters: schema,
              parse: JSON.parse,
              function: (given) => told.push(given) && "thanks",
            },
          },
        ],
      },
      { maxChatCompletions: 1 },
    );
    await run.done().catch((error) => assert.match(`${error}`, /missing|tool/i));
    assert.equal(typeof told[0]?.even, "boolean");
    const response_format = { type: "json_schema", json_schema: { name: "x", schema, strict: true } };
    const form = await openai.chat.completions.parse({
      ...chat,
      max_completion_tokens: 128,
      response_format,
    });
    assert.equal(typeof JSON.parse(form.choices[0].message.content).even, "boolean");
  },
  "openai: responses, embeddings and models": async () => {
    const asked = { model, input: "Hi", max_output_tokens: 8, temperature: 0, store: false };
    const whole = await openai.responses.create(asked);
    const final = await openai.responses.stream(asked).finalResponse();
    assert.equal(final.output_text, whole.output_text);
    const { data } = await openai.embeddings.create({ model, input: ["a", "b"] });
    assert.deepEqual([data.length, typeof data[0].embedding[0]], [2, "number"]);
    const { data: models } = await openai.models.list();
    assert.equal((await openai.models.retrieve(models[0].id)).id, models[0].id);
  },
  "openai: errors and a hang-up": async () => {
    const create = (wrong) => openai.chat.completions.create({ ...chat, ...wrong });
    const bad = await rejected(create({ temperature: 9 }), OpenAI.BadRequestError, 400);
    assert.equal(bad.param, "temperature");
    await rejected(create({ model: "other" }), OpenAI.NotFoundError, 404);
    await rejected(openai.moderations.create({ input: "a" }), OpenAI.NotFoundError, 404);
    const stream = await create({ stream: true, max_completion_tokens: 400 });
    for await (const chunk of stream) if (chunk.id) break; // which aborts it
    assert.ok(stream.controller.signal.aborted);
  },
  "openai: a file and a batch": async () => {
    const lines = ["a", "b"].map((custom_id) =>
      JSON.stringify({ custom_id, method: "POST", url: "/v1/chat/completions", body: chat }),
    );
    const file = await toFile(Buffer.from(lines.join("\n")), "lines.jsonl");
    const { id } = await openai.files.create({ file, purpose: "batch" });
    const made = await openai.batches.create({
      input_file_id: id,
      endpoint: "/v1/chat/completions",
      completion_window: "24h",
    });
    const over = await ended(
      () => openai.batches.retrieve(made.id),
      (batch) => ["completed", "failed", "expired", "cancelled"].includes(batch.status),
    );
    assert.deepEqual([over.status, over.request_counts.completed], ["completed", 2]);
    const output = await (await openai.files.content(over.output_file_id)).text();
    const found = output.trim().split("\n").map((line) => JSON.parse(line).custom_id);
    assert.deepEqual(found.sort(), ["a", "b"]);
    assert.ok((await openai.files.delete(over.output_file_id)).deleted);
  },
  "anthropic: a message, whole and streamed": async () => {
    const greedy = { ...message, temperature: 0 };
    const whole = await anthropic.messages.create(greedy);
    assert.ok(["max_tokens", "end_turn"].includes(whole.stop_reason));
    const events = [];
    for await (const event of await anthropic.messages.create({ ...greedy, stream: true }))
      events.push(event.type);
    assert.deepEqual([events[0], events.at(-1)], ["message_start", "message_stop"]);
    const final = await anthropic.messages.stream(greedy).finalMessage();
    assert.equal(final.content[0].text, whole.content[0].text);
    const counted = await anthropic.messages.countTokens({ model, messages });
    const { input_tokens, cache_read_input_tokens } = whole.usage;
    assert.equal(counted.input_tokens, input_tokens + (cache_read_input_tokens ?? 0));
  },
  "anthropic: a tool's input, streamed": async () => {
    const stream = anthropic.messages.stream({
      ...message,
      max_tokens: 128,
      tools: [{ name: "tell", description: "Tell it.", input_schema: schema }],
      tool_choice: { type: "tool", name: "tell" },
    });
    const pieces = [];
    stream.on("inputJson", (piece) => pieces.push(piece));
    const final = await stream.finalMessage();
    const call = final.content.find((block) => block.type === "tool_use");
    assert.equal(final.stop_reason, "tool_use");
    assert.equal(typeof call.input.even, "boolean");
    assert.deepEqual(JSON.parse(pieces.join("")), call.input);
    const again = await anthropic.messages.create({
      ...message,
      tools: [{ name: "tell", input_schema: schema }],
      messages: [
        ...messages,
        { role: "assistant", content: final.content },
        { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "ok" }] },
      ],
    });
    assert.equal(again.type, "message");
  },
  "anthropic: errors, models and a hang-up": async () => {
    const create = (wrong) => anthropic.messages.create({ ...message, ...wrong });
    const lost = await rejected(create({ model: "other" }), Anthropic.NotFoundError, 404);
    assert.ok(lost.requestID);
    await rejected(create({ max_tokens: -1 }), Anthropic.BadRequestError, 400);
    const listed = await anthropic.models.list();
    assert.equal(listed.data[0].type, "model");
    const stream = anthropic.messages.stream({ ...message, max_tokens: 400 });
    stream.on("text", () => stream.abort());
    await rejected(stream.done(), Anthropic.APIUserAbortError, undefined);
  },
  "anthropic: a batch": async () => {
    const requests = ["a", "b"].map((custom_id) => ({ custom_id, params: message }));
    const made = await anthropic.messages.batches.create({ requests });
    const over = await ended(
      () => anthropic.messages.batches.retrieve(made.id),
      (batch) => batch.processing_status === "ended",
    );
    assert.equal(over.request_counts.succeeded, 2);
    const found = [];
    for await (const one of await anthropic.messages.batches.results(made.id)) found.push(one);
    assert.deepEqual(found.map((one) => one.custom_id).sort(), ["a", "b"]);
    assert.equal(found[0].result.message.type, "message");
    assert.equal((await anthropic.messages.batches.delete(made.id)).id, made.id);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok     ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`failed ${name}: ${error.stack}`);
  }
}
process.exitCode = failed ? 1 : 0;
