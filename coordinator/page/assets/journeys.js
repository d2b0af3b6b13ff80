const PHASES = {
  admission: "admission", queue: "queue", prefill: "prefilling", "wait for room": "room",
  pull: "pull", join: "join", decode: "decoding", resume: "resume",
};
const ORDERS = [["newest", "Newest"], ["slowest", "Slowest"], ["unanswered", "Not answered"]];
const MOST_SHOWN = 100;
let journeys = new Map(); // request id |-> what is told of it, newest last
let order = "newest";
let tenant = "";

/** A phase as a bar; `total` is the length of the whole track. */
function stripe(step, total) {
  const bar = make("i", { className: PHASES[step.name], title: `${step.name} ${inMs(step.end - step.start)}` });
  bar.style.left = `${(100 * step.start) / total}%`;
  bar.style.width = `${(100 * (step.end - step.start)) / total}%`;
  return bar;
}

function lengthOf(journey) {
  return Math.max(...journey.steps.map((step) => step.end), 0.001);
}

function nodesOf(journey) {
  return [...new Set(journey.steps.map((step) => step.node).filter(Boolean))];
}

/** Where it ran, or why it was not answered. */
function outcomeOf(journey) {
  if (journey.ending === "left") return "client left";
  return journey.error || nodesOf(journey).join(" → ") || "–";
}

function buildJourney(journey) {
  const cached = journey.cached_tokens ? `, ${inCount(journey.cached_tokens)} cached` : "";
  const button = make(
    "button", { type: "button", "aria-expanded": "false" },
    make("span", { className: "when" }, new Date(journey.ended_at * 1000).toLocaleTimeString()),
    make("span", { className: "id mono" }, outcomeOf(journey)),
    make("span", { className: "strip" }),
    make("span", { className: "tokens" }, `${inCount(journey.prompt_tokens)} + ${inCount(journey.output_tokens)} tok`),
    make("span", { className: "total" }, inMs(lengthOf(journey))),
  );
  button.title = [journey.request_id + cached, journey.tenant].filter(Boolean).join(" · ");
  const item = make("li", { className: `journey ${journey.ending}` }, button);
  button.addEventListener("click", () => {
    const way = item.querySelector(".way");
    if (way) way.remove();
    else item.append(wayOf(journey));
    button.setAttribute("aria-expanded", String(!way));
  });
  return item;
}

/** All strips have one scale, so that longer ones took longer. */
function scaleStrip(item, journey, scale) {
  const strip = item.querySelector(".strip");
  if (strip.dataset.scale === String(scale)) return;
  strip.dataset.scale = scale;
  strip.classList.toggle("cut", lengthOf(journey) > scale);
  const whole = make("b");
  whole.style.width = `${Math.min(100, (100 * lengthOf(journey)) / scale)}%`;
  const steps = journey.steps.filter((step) => step.start < scale);
  strip.replaceChildren(whole, ...steps.map((step) => stripe({ ...step, end: Math.min(step.end, scale) }, scale)));
}

/** The length of the whole ruler: the longest request, unless nearly all are far shorter. */
function rulerOf(shown) {
  const lengths = shown.map(lengthOf).sort((one, other) => one - other);
  const longest = lengths.at(-1) ?? 1;
  const most = lengths[Math.floor(0.9 * (lengths.length - 1))] ?? 1;
  return roundUp(longest > 3 * most ? 1.5 * most : longest);
}

/** The time line of one request: a lane for each process, and the same as a table. */
function wayOf(journey) {
  const total = lengthOf(journey);
  const lanes = [...new Set(journey.steps.map((step) => step.node))].map((node) =>
    make("div", { className: "lane", "aria-hidden": "true" },
      make("b", {}, node || "coordinator"),
      make("div", { className: "track" }, ...journey.steps.filter((step) => step.node === node).map((step) => stripe(step, total)))));
  const rows = journey.steps.map((step) =>
    make("tr", {},
      make("td", {}, make("i", { className: PHASES[step.name] }), step.name), make("td", {}, step.node || "coordinator"),
      make("td", {}, inMs(step.start)), make("td", {}, inMs(step.end - step.start))));
  const said = [
    `class ${journey.slo_class}`, `${journey.prompt_tokens} prompt tokens (${journey.cached_tokens} cached)`, `${journey.output_tokens} output tokens`, journey.tenant ? `tenant ${journey.tenant}` : null,
    journey.interruptions ? `interrupted ${journey.interruptions} times` : null, journey.error ? `ended with ${journey.error}` : null,
  ];
  return make(
    "div", { className: "way" },
    make("p", {}, make("code", {}, journey.request_id), ` · ${said.filter(Boolean).join(" · ")}`),
    ...lanes,
    make("div", { className: "scale", "aria-hidden": "true" }, make("span", {}, "0"), make("span", {}, inMs(total / 2)), make("span", {}, inMs(total))),
    make("div", { className: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, ...["Phase", "Where", "After", "For"].map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...rows))),
  );
}

function beginJourneys() {
  get("phase-key").replaceChildren(...Object.entries(PHASES).map(([name, style]) => make("li", { className: style }, name)), make("li", { className: "gaps" }, "gaps: messages between processes"));
  choice(get("orders"), ORDERS, order, (chosen) => {
    order = chosen;
    showJourneys();
  });
  get("tenant").addEventListener("change", () => {
    tenant = get("tenant").value;
    showJourneys();
  });
}

function takeJourneys(news, isFirst) {
  if (isFirst) journeys = new Map();
  for (const journey of news.journeys) journeys.set(journey.request_id, journey);
  for (const [id, journey] of journeys) if (journey.ended_at < newestAt() - LONGEST_S) journeys.delete(id);
  forgetSome();
}

/** Keeps what the coordinator keeps: the newest, the slowest, and those without an answer. */
function forgetSome() {
  const all = [...journeys.values()];
  const kept = new Set([
    ...all.slice(-MOST_SHOWN),
    ...all.filter((journey) => journey.ending !== "answered").slice(-MOST_SHOWN),
    ...all.toSorted((one, other) => lengthOf(other) - lengthOf(one)).slice(0, MOST_SHOWN),
  ]);
  for (const [id, journey] of journeys) if (!kept.has(journey)) journeys.delete(id);
}

function chosenJourneys() {
  const all = [...journeys.values()].filter((one) => isInWindow(one.ended_at) && (!tenant || one.tenant === tenant));
  if (order === "unanswered") return all.filter((one) => one.ending !== "answered").reverse();
  if (order === "slowest") return all.sort((one, other) => lengthOf(other) - lengthOf(one));
  return all.reverse();
}

function showTenantChoice() {
  const names = [...new Set([...journeys.values()].map((one) => one.tenant).filter(Boolean))].sort();
  get("tenant-choice").hidden = !names.length;
  const options = [["", "all"], ...names.map((name) => [name, name])];
  keep(get("tenant"), options, ([name]) => `t${name}`, ([name, text]) => make("option", { value: name }, text), () => {});
}

function showJourneys() {
  showTenantChoice();
  const shown = chosenJourneys().slice(0, MOST_SHOWN);
  const ruler = rulerOf(shown);
  get("no-requests").hidden = shown.length > 0;
  get("ruler").hidden = !shown.length;
  const [, half, whole] = get("ruler").children;
  say(half, inMs(ruler / 2));
  say(whole, inMs(ruler));
  say(get("no-requests"), journeys.size ? "None of them in this window." : "No request has ended yet. Try the playground.");
  keep(get("journeys"), shown, (journey) => journey.request_id, buildJourney, (item, journey) => scaleStrip(item, journey, ruler));
}

/** Opens the time line of a request, once it is there. */
function showWay(requestId) {
  const item = [...get("journeys").children].find((child) => child.dataset.key === requestId);
  if (!item) return;
  if (!item.querySelector(".way")) item.querySelector("button").click();
  item.scrollIntoView({ block: "center" });
  item.querySelector("button").focus();
}
