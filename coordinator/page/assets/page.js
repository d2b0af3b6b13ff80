let periods = [];
let known = new Map(); // node id |-> its state, for announcements
const MOST_PERIODS = 120;

function vital(name, value, level = "") {
  return make("div", { className: level }, make("dt", {}, name), make("dd", {}, value));
}

function lately(read) {
  return periods.findLast((period) => read(period) !== null);
}

function showVitals(news) {
  const status = news.status;
  const last = periods.slice(-6);
  const total = (read) => last.reduce((sum, period) => sum + read(period), 0);
  const seconds = total((period) => period.seconds) || 1;
  const kept = last.flatMap((period) => Object.values(period.promises));
  const calls = kept.reduce((sum, one) => sum + one.calls, 0);
  const share = calls ? kept.reduce((sum, one) => sum + one.kept, 0) / calls : null;
  const refused = total((period) => period.refused);
  const failed = total((period) => period.failed);
  get("vitals").replaceChildren(
    vital("In flight", inCount(status.inflight)),
    vital("In line", inCount(status.waiting), status.waiting ? "warn" : ""),
    vital("Output tok / s", inCount(Math.round(total((period) => period.output_tokens) / seconds))),
    vital("TTFT, median", inMs(lately((period) => period.ttft_p50)?.ttft_p50)),
    vital("TPOT, median", inMs(lately((period) => period.tpot_p50)?.tpot_p50)),
    vital("Promises kept", inPercent(share), share === null ? "" : share < 0.9 ? "bad" : share < 0.99 ? "warn" : ""),
    vital("Refused, failed", `${refused}, ${failed}`, failed ? "bad" : refused ? "warn" : ""),
    vital("Cached share", inPercent(status.prefixes.cached_share)),
    ...costVitals(status.coordinator.costs),
  );
}

/** Only where prices are given. */
function costVitals(costs) {
  if (!costs) return [];
  return [vital("Cost / hour", inCount(costs.per_hour)), vital("Cost / M output", inCount(costs.per_million_output))];
}

function showState(status) {
  say(get("model"), `${status.model} · ${status.mode}`);
  document.title = `${status.ready ? "" : "✕ "}pdserve · ${status.model}`;
  const serving = get("serving");
  serving.className = `pill ${status.ready ? "good" : "bad"}`;
  say(serving, status.ready ? "serving" : "not ready");
  const warnings = status.nodes.filter(problems).map((node) => `${node.node_id}: ${problems(node)}`);
  get("warnings").hidden = !warnings.length;
  say(get("warnings"), warnings.join("\n"));
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
  let isDrawing = false;
  let latest = null;
  const draw = () => {
    isDrawing = false;
    showVitals(latest);
    showState(latest.status);
    showPools(latest.status);
    showCharts(periods);
  };
  watch((news, isFirst) => {
    if (isFirst) periods = [];
    if (periods.at(-1)?.isCurrent) periods.pop();
    for (const period of news.periods) periods.push({ ...period, seconds: news.period_s });
    const since = news.current.ends_at - (periods.at(-1)?.ends_at ?? 0);
    periods.push({ ...news.current, seconds: Math.min(news.period_s, Math.max(1, since)), isCurrent: true });
    periods = periods.slice(-MOST_PERIODS);
    model = news.status.model;
    latest = news;
    say(get("version"), `pdserve ${news.version}`);
    showJourneys(news, isFirst);
    if (!isDrawing) requestAnimationFrame(draw);
    isDrawing = true;
  }, (state) => {
    get("live").classList.toggle("on", state === "live");
    say(get("live").lastElementChild, state);
  });
}

begin();
