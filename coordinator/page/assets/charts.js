const WIDTH = 400;
const HEIGHT = 130;
const BOTTOM = 4;
const SHORTEST_S = 60; // shown while there is no longer history

/** The least round number that is not below `value`. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.9999);
}

/**
 * A line chart over time.
 *
 * `read` makes {name: number or null} of a period; `format` writes a number; `top` fixes the scale.
 */
function lineChart({ title, read, format, top = null, colours = null }) {
  const legend = make("span", { className: "legend" });
  const at = make("span", { className: "at" });
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", tabindex: 0, role: "img" });
  const labels = make("div", { className: "ticks" });
  const highest = make("span", { className: "highest", "aria-hidden": "true" });
  const none = make("p", { className: "none" }, "nothing yet");
  const figure = make("figure", { className: "chart" }, make("figcaption", {}, title, at, legend), highest, svg, labels, none);
  let points = [];
  let cursor = null;
  let shownSpan = SHORTEST_S;

  function show() {
    const names = [...new Set(points.flatMap((point) => Object.keys(point.values)))];
    const numbers = points.flatMap((point) => Object.values(point.values)).filter((v) => v !== null);
    const scale = top ?? roundUp(Math.max(...numbers, 0));
    const end = points.length ? points.at(-1).at : 0;
    const span = points.length ? Math.min(windowS, Math.max(SHORTEST_S, end - points[0].at)) : SHORTEST_S;
    const x = (point) => WIDTH * (1 - (end - point.at) / span);
    const y = (value) => (HEIGHT - BOTTOM) * (1 - value / scale) + 2;
    none.hidden = numbers.length > 0;
    svg.replaceChildren(...[0, 0.5, 1].map((share) =>
      draw("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(scale * share), y2: y(scale * share) })));
    names.forEach((name, index) => {
      const colour = colours?.[name] ?? `c${index % 5}`;
      for (const run of runs(points, name)) {
        const line = run.map((point) => `${x(point).toFixed(1)} ${y(point.values[name]).toFixed(1)}`);
        if (line.length === 1) line.push(`${(x(run[0]) + 0.5).toFixed(1)} ${y(run[0].values[name]).toFixed(1)}`);
        svg.append(draw("path", { class: `area ${colour}`, d: `M${x(run[0]).toFixed(1)} ${y(0)}L${line.join("L")}L${x(run.at(-1)).toFixed(1)} ${y(0)}Z` }));
        svg.append(draw("path", { class: colour, d: `M${line.join("L")}` }));
      }
    });
    const shown = cursor === null ? newest(points) : points[cursor];
    if (cursor !== null && shown) svg.append(draw("line", { class: "cursor", x1: x(shown), x2: x(shown), y1: 0, y2: HEIGHT - BOTTOM + 2 }));
    say(at, cursor === null || !shown ? "" : new Date(shown.at * 1000).toLocaleTimeString());
    legend.replaceChildren(...names.map((name, index) => {
      const value = shown?.values[name] ?? null;
      return make("span", { className: colours?.[name] ?? `c${index % 5}` }, `${name} `, make("b", {}, value === null ? "–" : format(value)));
    }));
    shownSpan = span;
    say(highest, format(scale));
    labels.replaceChildren(make("span", {}, `${spanText(span)} ago`), make("span", {}, "now"));
    const told = names.map((name) => `${name} ${shown?.values[name] == null ? "none" : format(shown.values[name])}`);
    svg.setAttribute("aria-label", `${title}: ${told.join(", ") || "nothing yet"}. Arrow keys look back.`);
  }

  function move(to) {
    cursor = to === null || !points.length ? null : Math.max(0, Math.min(points.length - 1, to));
    show();
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const time = points.length ? points.at(-1).at - shownSpan * (1 - (event.clientX - box.left) / box.width) : 0;
    let nearest = 0;
    points.forEach((point, i) => { if (Math.abs(point.at - time) < Math.abs(points[nearest].at - time)) nearest = i; });
    move(nearest);
  });
  svg.addEventListener("pointerleave", () => move(null));
  svg.addEventListener("blur", () => move(null));
  svg.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    if (!(event.key in steps)) return;
    event.preventDefault();
    move((cursor ?? points.length) + steps[event.key]);
  });

  function update(pieces) {
    points = pieces.map((period) => ({ at: period.ends_at, values: read(period) }));
    if (cursor !== null && cursor >= points.length) cursor = null;
    show();
  }
  return { figure, update };
}

/** The newest point with a value: an idle moment must not hide the last measurement. */
function newest(points) {
  return points.findLast((point) => Object.values(point.values).some((value) => value !== null)) ?? points.at(-1);
}

/** Stretches without a gap. */
function runs(points, name) {
  const found = [];
  let open = null;
  for (const point of points) {
    const value = point.values[name];
    if (value === null || value === undefined) open = null;
    else if (open) open.push(point);
    else found.push((open = [point]));
  }
  return found;
}

function makeCharts(parent) {
  const quantiles = (name) => (piece) => ({ p50: quantile(piece[name], 0.5), p99: quantile(piece[name], 0.99) });
  const rate = (piece, number) => number / piece.seconds;
  const promises = lineChart({
    title: "Promises kept",
    read: (piece) => Object.fromEntries(Object.entries(piece.promises).map(([name, p]) => [name, p.kept / p.calls])),
    format: inPercent,
    top: 1,
  });
  const charts = [
    lineChart({ title: "TTFT", read: quantiles("ttft"), format: inMs }),
    lineChart({ title: "TPOT", read: quantiles("tpot"), format: inMs }),
    lineChart({ title: "Tokens / s", read: (piece) => ({ prompt: rate(piece, piece.prompt_tokens), output: rate(piece, piece.output_tokens) }), format: inCount, colours: { prompt: "c0", output: "c2" } }),
    lineChart({
      title: "Calls / s",
      read: (piece) => {
        const { answered = 0, failed = 0, refused = 0, rejected = 0, left = 0 } = piece.endings;
        return { answered: rate(piece, answered), failed: rate(piece, failed), refused: rate(piece, refused), "client errors": rate(piece, rejected + left) };
      },
      format: inCount,
      colours: { answered: "c2", failed: "c4", refused: "c3", "client errors": "c5" },
    }),
    lineChart({ title: "In flight", read: (piece) => ({ most: piece.most_inflight, mean: piece.mean_inflight, "in line": piece.most_waiting }), format: inCount, colours: { most: "c0", mean: "c2", "in line": "c3" } }),
    lineChart({ title: "KV in use", read: (piece) => piece.kv_used, format: inPercent, top: 1, colours: { prefill: "c0", decode: "c2" } }),
    promises,
  ];
  promises.figure.classList.add("wide");
  parent.append(...charts.map((chart) => chart.figure));
  return (pieces) => {
    promises.figure.hidden = !pieces.some((piece) => Object.keys(piece.promises).length);
    charts.forEach((chart) => chart.update(pieces));
  };
}
