let messages = [];
let running = null; // AbortController of the answer that is on its way
let model = "";

function bubble(role, text) {
  get("talk").querySelector(".empty")?.remove();
  const element = make("div", { className: `said ${role}` }, text);
  get("talk").append(element);
  return element;
}

function measured(answer) {
  const tpot = answer.tokens > 1 ? (answer.lastMs - answer.firstMs) / (answer.tokens - 1) : null;
  const nodes = answer.prefill ? `${answer.prefill} → ${answer.decode || "–"}` : answer.decode || "–";
  const facts = [["TTFT", inMs(answer.firstMs)], ["TPOT", inMs(tpot)], ["tokens", inCount(answer.tokens)], ["served by", nodes]];
  const way = make("button", { type: "button", className: "plain" }, "Time line");
  way.addEventListener("click", () => showWay(answer.id));
  return make("p", { className: "measured" },
    ...facts.map(([name, value]) => make("span", {}, `${name} `, make("b", {}, value))), way);
}

async function answerTo(signal, element) {
  const began = performance.now();
  const answer = { text: "", tokens: 0, firstMs: null, lastMs: 0, id: "", prefill: "", decode: "" };
  const response = await post("v1/chat/completions", {
    model, messages, stream: true, stream_options: { include_usage: true },
    max_tokens: Number(get("max-tokens").value), temperature: Number(get("temperature").value),
  }, signal);
  answer.prefill = response.headers.get("x-pdserve-prefill-node");
  answer.decode = response.headers.get("x-pdserve-decode-node");
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    answer.id = chunk.id;
    answer.tokens = chunk.usage?.completion_tokens ?? answer.tokens;
    const delta = chunk.choices[0]?.delta ?? {};
    const text = (delta.reasoning_content ?? "") + (delta.content ?? "");
    if (!text) continue;
    answer.lastMs = performance.now() - began;
    answer.firstMs ??= answer.lastMs;
    answer.text += text;
    say(element, answer.text);
    element.parentElement.scrollTop = element.parentElement.scrollHeight;
  }
  return answer;
}

async function send(event) {
  event.preventDefault();
  const question = get("question").value.trim() || get("question").placeholder;
  if (running) return;
  running = new AbortController();
  get("question").value = "";
  get("send").disabled = true;
  get("stop").hidden = false;
  messages.push({ role: "user", content: question });
  bubble("user", question);
  const element = bubble("assistant", "…");
  try {
    const answer = await answerTo(running.signal, element);
    messages.push({ role: "assistant", content: answer.text });
    if (!answer.text) say(element, "(an empty answer)");
    element.after(measured(answer));
  } catch (error) {
    messages.pop();
    if (error.status === 401) askForKey(error.message);
    element.classList.add("error");
    say(element, error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    running = null;
    get("send").disabled = false;
    get("stop").hidden = true;
    get("talk").scrollTop = get("talk").scrollHeight;
    get("question").focus();
  }
}

function beginPlayground() {
  get("ask").addEventListener("submit", send);
  get("stop").addEventListener("click", () => running?.abort());
  get("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    get("talk").replaceChildren(make("p", { className: "empty" }, "Ask the model something."));
  });
  get("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      get("ask").requestSubmit();
    }
  });
}
