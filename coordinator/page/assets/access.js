const KEY = "pdserve-key";

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Asks for a key; resolves when one was given. */
function askForKey(why) {
  const dialog = get("key-dialog");
  say(get("key-why"), why);
  return new Promise((resolve) => {
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.onclose = () => {
      sessionStorage.setItem(KEY, get("key").value.trim());
      get("key").value = "";
      resolve();
    };
    if (!dialog.open) dialog.showModal();
  });
}

/** A failed answer as an Error with its status. */
async function failure(response) {
  let message = `the coordinator answers ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // it is not the coordinator's own answer: its status has to do
  }
  return Object.assign(new Error(message), { status: response.status });
}

async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  return response;
}

/** Shows where a link leads with the page's key, which a browser would not send. */
function showWithKey(link) {
  const show = async (event) => {
    if (event.button > 1 || !sessionStorage.getItem(KEY)) return;
    event.preventDefault();
    for (;;) {
      const response = await fetch(link.href, { headers: headers() });
      if (response.ok) {
        const isJson = response.headers.get("Content-Type").includes("json");
        const type = isJson ? "application/json" : "text/plain;charset=utf-8";
        const url = URL.createObjectURL(new Blob([await response.text()], { type }));
        open(url, "_blank");
        setTimeout(() => URL.revokeObjectURL(url), 60_000); // it has long been shown
        return;
      }
      const { message, status } = await failure(response);
      if (status !== 401 && status !== 403) return announce(message);
      await askForKey(message);
    }
  };
  link.addEventListener("click", show);
  link.addEventListener("auxclick", show);
}

/** The data of each event of a stream. (EventSource cannot send a key.) */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const whole = rest.split("\n\n");
    rest = whole.pop();
    for (const event of whole) {
      const data = event.split("\n").filter((line) => line.startsWith("data: "));
      if (data.length) yield data.map((line) => line.slice(6)).join("\n");
    }
  }
}

function wait(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Passes on what the coordinator tells, for as long as the page is open. */
async function watch(onNews, onState) {
  let isFirst = true;
  let leaving = new AbortController();
  // A page that was left may be kept, and would keep one of the few connections to this host.
  addEventListener("pagehide", () => leaving.abort());
  for (let pause = 500; ; pause = Math.min(pause * 2, 8000)) {
    try {
      leaving = new AbortController();
      const response = await fetch("admin/live", { headers: headers(), signal: leaving.signal });
      if (response.status === 401 || response.status === 403) {
        onState("needs a key");
        await askForKey((await failure(response)).message);
        pause = 250;
        continue;
      }
      if (!response.ok) throw await failure(response);
      isFirst = true;
      for await (const data of events(response)) {
        onState("live");
        pause = 500;
        onNews(JSON.parse(data), isFirst);
        isFirst = false;
      }
    } catch (error) {
      if (error.name !== "AbortError") console.info("pdserve:", error.message);
    }
    onState("reconnecting");
    await wait(pause);
  }
}
