const PHASES = {
  admission: "admission", queue: "queue", prefill: "prefilling", "wait for room": "room",
  pull: "pull", join: "join", decode: "decoding", resume: "resume",
};
const MOST_SHOWN = 100;
let journeys = [];

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

function buildJourney(journey) {
  const total = lengthOf(journey);
  const cached = journey.cached_tokens ? `, ${inCount(journey.cached_tokens)} cached` : "";
  const button = make(
    "button", { type: "button", "aria-expanded": "false" },
    make("span", { className: "when" }, new Date(journey.ended_at * 1000).toLocaleTimeString()),
    make("span", { className: "id mono" }, journey.error || nodesOf(journey).join(" → ") || "–"),
    make("span", { className: "strip" }, ...journey.steps.map((step) => stripe(step, total))),
    make("span", { className: "tokens" }, `${inCount(journey.prompt_tokens)} + ${inCount(journey.output_tokens)} tokens`),
    make("span", { className: "total" }, inMs(total)),
  );
  button.title = `${journey.request_id}${cached}`;
  const item = make("li", { className: `journey${journey.error ? " failed" : ""}` }, button);
  button.addEventListener("click", () => {
    const way = item.querySelector(".way");
    if (way) way.remove();
    else item.append(wayOf(journey));
    button.setAttribute("aria-expanded", String(!way));
  });
  return item;
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
    `class ${journey.slo_class}`, `${journey.prompt_tokens} prompt tokens (${journey.cached_tokens} cached)`, `${journey.output_tokens} output tokens`,
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

function showJourneys(news, isFirst) {
  if (isFirst) {
    journeys = [];
    get("phase-key").replaceChildren(...Object.entries(PHASES).map(([name, style]) => make("li", { className: style }, name)), make("li", { className: "gaps" }, "gaps: messages between processes"));
  }
  journeys = [...news.journeys.toReversed(), ...journeys].slice(0, MOST_SHOWN);
  get("no-requests").hidden = journeys.length > 0;
  keep(get("journeys"), journeys, (journey) => journey.request_id, buildJourney, () => {});
}

/** Opens the time line of a request, once it is there. */
function showWay(requestId) {
  const item = [...get("journeys").children].find((child) => child.dataset.key === requestId);
  if (!item) return;
  if (!item.querySelector(".way")) item.querySelector("button").click();
  item.scrollIntoView({ block: "center" });
  item.querySelector("button").focus();
}
