// Streams that outlive their coordinator: a `fetch` for the openai SDK, new OpenAI({ fetch }).
//
// pdserve up
// node examples/resuming.mjs [URL [OTHER_COORDINATOR ...]]

import { randomUUID } from "node:crypto";
import { pathToFileURL } from "node:url";

/** A fetch that sends calls under a key, and takes streams up where the connection broke. */
export function resuming(coordinators, withinMs = 60_000) {
  const urls = coordinators.map((url) => new URL(url));

  async function send(url, init, headers) {
    for (const end = Date.now() + withinMs; ; urls.push(urls.shift())) {
      const { protocol, host } = urls[0];
      const there = Object.assign(new URL(url), { protocol, host });
      try {
        const response = await fetch(there, { ...init, headers });
        if (![409, 502, 503].includes(response.status) || Date.now() > end) return response;
        await response.body?.cancel();
      } catch (error) {
        if (init.signal?.aborted || Date.now() > end) throw error;
      }
      await new Promise((resolve) => setTimeout(resolve, 200));
    }
  }

  /** Whole events: of a torn one, nothing is passed on, and it comes again. */
  async function* events(response, url, init, headers) {
    for (;;) {
      let rest = "";
      try {
        for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
          const whole = (rest + piece).split("\n\n");
          rest = whole.pop();
          for (const event of whole) {
            const id = event.match(/^id: (.*)$/m)?.[1];
            if (id) headers.set("Last-Event-ID", id);
            yield new TextEncoder().encode(`${event}\n\n`);
          }
        }
        return;
      } catch (error) {
        if (init.signal?.aborted) throw error;
        if (!headers.has("Last-Event-ID")) headers.set("Last-Event-ID", "0");
        response = await send(url, init, headers);
        if (!response.ok) throw error;
      }
    }
  }

  return async (url, init = {}) => {
    const headers = new Headers(init.headers);
    if (!headers.has("Idempotency-Key")) headers.set("Idempotency-Key", randomUUID());
    const response = await send(url, init, headers);
    if (!response.headers.get("content-type")?.startsWith("text/event-stream")) return response;
    const body = ReadableStream.from(events(response, url, init, headers));
    return new Response(body, { status: response.status, headers: response.headers });
  };
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const urls = process.argv.length > 2 ? process.argv.slice(2) : ["http://127.0.0.1:8000"];
  const { data } = await (await fetch(`${urls[0]}/v1/models`)).json();
  const prompt = "Once upon a time, there was a little fox named Ruby.";
  const limits = { max_tokens: 400, temperature: 0, ignore_eos: true };
  const body = JSON.stringify({ model: data[0].id, prompt, stream: true, ...limits });
  const asked = { method: "POST", headers: { "Content-Type": "application/json" }, body };
  const response = await resuming(urls)(`${urls[0]}/v1/completions`, asked);
  for await (const event of response.body.pipeThrough(new TextDecoderStream())) {
    const data = event.match(/^data: (\{.*)$/m)?.[1];
    if (data) process.stdout.write(JSON.parse(data).choices[0].text);
  }
  process.stdout.write("\n");
}
