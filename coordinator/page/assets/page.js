let known = new Map(); // node id |-> its state, for announcements

function vital(name, value, note = "", level = "") {
  const [number, ...unit] = value.split(" ");
  return make("div", { className: level },
    make("dt", {}, name), make("dd", {}, number, unit.length ? make("small", {}, ` ${unit.join(" ")}`) : null), make("dd", { className: "note" }, note));
}

function showVitals(status) {
  const sum = together(inWindow());
  const { answered = 0, failed = 0, refused = 0, rejected = 0, left = 0 } = sum.endings;
  const calls = callsOf(sum.endings);
  const latency = (name) => [inMs(quantile(sum[name], 0.5)), `median · p99 ${inMs(quantile(sum[name], 0.99))}`];
  get("vitals").replaceChildren(
    vital("In flight, most", inCount(sum.most_inflight), `mean ${inCount(sum.mean_inflight)} · most in line ${inCount(sum.most_waiting)}`),
    vital("Calls", inCount(calls), `${inCount(answered)} answered · ${inCount(calls / sum.seconds)} / s`),
    vital("Failed", inCount(failed), calls ? `${inPercent(failed / calls)} of all calls` : "", failed ? "bad" : ""),
    vital("Refused", inCount(refused), "no room, or beyond a limit (429)", refused ? "warn" : ""),
    vital("Ended by clients", inCount(rejected + left), `${inCount(rejected)} mistakes (4xx) · ${inCount(left)} left`),
    vital("TTFT", ...latency("ttft")),
    vital("TPOT", ...latency("tpot")),
    vital("Output", `${inCount(sum.output_tokens / sum.seconds)} tok/s`, `prompts ${inCount(sum.prompt_tokens / sum.seconds)} tok/s`),
    vital("Prompt tokens cached", sum.prompt_tokens ? inPercent(sum.cached_tokens / sum.prompt_tokens) : "–", `of ${inCount(sum.prompt_tokens)} tokens`),
    promiseVital(sum.promises),
    ...costVitals(status.coordinator.costs),
  );
  const codes = Object.entries(sum.errors).sort((one, other) => other[1] - one[1]);
  get("errors").hidden = !codes.length;
  get("errors").replaceChildren(...codes.map(([code, count]) => make("span", {}, make("code", {}, code), ` ${inCount(count)}`)));
}

/** Without promises there is nothing to keep. */
function promiseVital(promises) {
  const all = Object.values(promises);
  const calls = all.reduce((sum, one) => sum + one.calls, 0);
  if (!calls) return vital("Promises kept", "–", "no call was promised anything");
  const share = all.reduce((sum, one) => sum + one.kept, 0) / calls;
  return vital("Promises kept", inPercent(share), `of ${inCount(calls)} calls`, share < 0.9 ? "bad" : share < 0.99 ? "warn" : "");
}

/** Only where prices are given. */
function costVitals(costs) {
  if (!costs) return [];
  return [vital("Cost / hour", inCount(costs.per_hour), "last minutes"), vital("Cost / M output", inCount(costs.per_million_output), "last minutes")];
}

function showWindow() {
  const name = WINDOWS.find(([seconds]) => seconds === windowS)[1];
  say(get("window-name"), name);
  const seconds = inWindow().reduce((sum, period) => sum + period.seconds, 0);
  say(get("window-note"), seconds < windowS - 10 ? `of which ${spanText(seconds)} are known` : "");
}

function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));
}

function showFindings(findings) {
  const list = get("findings");
  keep(
    list, findings, (found) => `${found.check} ${found.what}`,
    (found) => make("li", { className: found.level }, make("b", {}, found.level), make("span", {}, ...withCode(found.what), found.advice ? make("em", {}, ...withCode(found.advice)) : null)),
    () => {},
  );
  const fine = list.querySelector(".fine");
  if (findings.length) fine?.remove();
  else if (!fine) list.append(make("li", { className: "fine" }, "pdserve doctor finds nothing to do"));
}

function showTenants() {
  const { tenants } = together(inWindow());
  const rows = Object.entries(tenants).sort((one, other) => callsOf(other[1].endings) - callsOf(one[1].endings));
  get("tenants").hidden = !rows.length;
  const cells = ([name, one]) => [name, inCount(callsOf(one.endings)), ...ENDINGS.map((ending) => inCount(one.endings[ending] ?? 0)), inCount(one.prompt_tokens), inCount(one.output_tokens)];
  keep(
    get("tenant-rows"), rows, ([name]) => name,
    (row) => make("tr", {}, ...cells(row).map(() => make("td"))),
    (element, row) => cells(row).forEach((text, index) => say(element.cells[index], text)),
  );
}

function showState(status) {
  say(get("model"), `${status.model} · ${status.mode}`);
  document.title = `${status.ready ? "" : "✕ "}pdserve · ${status.model}`;
  const serving = get("serving");
  serving.className = `pill ${status.ready ? "good" : "bad"}`;
  say(serving, status.ready ? "serving" : "not ready");
  tellChanges(status.nodes);
}

function tellChanges(nodes) {
  const now = new Map(nodes.map((node) => [node.node_id, `${node.state} ${node.role}`]));
  const told = [...now].filter(([id, state]) => known.size && known.get(id) !== state).map(([id, state]) => `${id} is a ${state} node`);
  told.push(...[...known.keys()].filter((id) => !now.has(id)).map((id) => `${id} is gone`));
  if (told.length) announce(told.join(", "));
  known = now;
}

function begin() {
  const showCharts = makeCharts(get("charts"));
  beginPlayground();
  beginJourneys();
  document.querySelectorAll("a.keyed").forEach(showWithKey);
  let isDrawing = false;
  let latest = null;
  const draw = () => {
    isDrawing = false;
    if (!latest) return;
    showWindow();
    showVitals(latest.status);
    showFindings(latest.findings);
    showState(latest.status);
    showPools(latest.status);
    showCharts(pieces());
    showTenants();
    showJourneys();
  };
  choice(get("windows"), WINDOWS, windowS, (chosen) => {
    windowS = chosen;
    draw();
  });
  watch((news, isFirst) => {
    takePeriods(news, isFirst);
    takeJourneys(news, isFirst);
    model = news.status.model;
    latest = news;
    say(get("version"), `pdserve ${news.version}`);
    if (!isDrawing) requestAnimationFrame(draw);
    isDrawing = true;
  }, (state) => {
    get("live").classList.toggle("on", state === "live");
    say(get("live").lastElementChild, state);
  });
}

begin();
