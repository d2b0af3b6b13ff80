function fact(name) {
  return make("div", {}, make("dt", {}, name), make("dd"));
}

function buildNode(node) {
  const card = make(
    "li", { className: "node" },
    make("header", {}, make("h4"), make("span", { className: "state" }, make("i", { "aria-hidden": "true" }), make("span"))),
    make("dl", { className: "facts" }, fact("running"), fact("waiting"), fact("step"), fact("queued tokens"), fact("predicted queue"), fact("predicted TPOT")),
    make("div", { className: "kv" },
      make("p", {}, make("span"), make("span")),
      make("div", { className: "bar", "aria-hidden": "true" }, make("i", { className: "used" }), make("i", { className: "pinned" }), make("i", { className: "cached" }))),
    make("p", { className: "why", hidden: true }),
    make("footer", {}, make("button", { type: "button", className: "flip" }), make("button", { type: "button", className: "drain" }, "Drain")),
  );
  card.querySelector(".flip").addEventListener("click", () => flip(card.node));
  card.querySelector(".drain").addEventListener("click", () => drain(card.node));
  return card;
}

function updateNode(card, node) {
  card.node = node;
  const other = node.role === "prefill" ? "decode" : "prefill";
  const state = node.is_standby ? "standby" : node.state;
  card.className = `node ${state}${node.failing.length || node.is_alone ? " failing" : ""}`;
  const names = [node.node_id, node.model, node.place_of && `on ${node.place_of}`];
  say(card.querySelector("h4"), names.filter(Boolean).join(" · "));
  card.querySelector(".state").className = `state ${state}`;
  const loading = state === "loading" ? ` ${Math.round(node.loading_progress * 100)} %` : "";
  say(card.querySelector(".state span"), state + loading);
  const facts = [
    inCount(node.running_requests), inCount(node.waiting_requests), inMs(node.step_time_ms),
    inCount(node.queued_tokens), inMs(node.predicted_queue_ms), inMs(node.predicted_tpot_ms),
  ];
  card.querySelectorAll(".facts dd").forEach((element, index) => say(element, facts[index]));
  const used = node.num_blocks - node.free_blocks;
  const [text, amount] = card.querySelectorAll(".kv p span");
  say(text, `KV ${inPercent(used / node.num_blocks)} of ${inCount(node.num_blocks)} blocks`);
  say(amount, `${inCount(node.pinned_blocks)} pinned, ${inCount(node.cached_blocks)} cached`);
  const widths = [Math.max(0, used - node.pinned_blocks), node.pinned_blocks, node.cached_blocks];
  card.querySelectorAll(".bar i").forEach((element, index) => { element.style.width = `${(100 * widths[index]) / node.num_blocks}%`; });
  const why = card.querySelector(".why");
  const said = problems(node);
  why.hidden = !said;
  say(why, said);
  say(card.querySelector(".flip"), `Move to ${other}`);
  card.querySelector(".flip").setAttribute("aria-label", `Move ${node.node_id} to the ${other} pool`);
  card.querySelector(".drain").setAttribute("aria-label", `Drain ${node.node_id}`);
  for (const button of card.querySelectorAll("button")) button.disabled = node.state === "draining" || node.state === "sick";
}

function problems(node) {
  const said = [];
  if (node.reason) said.push(node.reason);
  if (node.is_alone) said.push("no ready node of the other pool shares a transport with it");
  for (const peer of node.failing) said.push(`handoffs with ${peer.peer} fail: ${peer.error} (${peer.failures} times)`);
  return said.join("\n");
}

function showPools(status) {
  for (const role of ["prefill", "decode"]) {
    const nodes = status.nodes.filter((node) => node.role === role);
    const list = get(`${role}-nodes`);
    keep(list, nodes, (node) => node.node_id, buildNode, updateNode);
    const empty = list.querySelector(".empty");
    if (nodes.length) empty?.remove();
    else if (!empty) list.append(make("li", { className: "empty" }, "no node"));
    const ready = nodes.filter((node) => node.state === "ready").length;
    say(get(`${role}-sum`), `${ready} of ${nodes.length} ready`);
  }
  showLinks(status.nodes);
}

function showLinks(nodes) {
  const links = nodes.flatMap((node) => node.links.map((link) => ({ puller: node.node_id, ...link })));
  const cells = (link) => [link.puller, link.peer, link.codec === "raw" || !link.codec ? link.transport : `${link.transport}, ${link.codec}`, link.reason];
  keep(
    get("links"), links, (link) => `${link.puller} ${link.peer}`,
    (link) => make("tr", {}, ...cells(link).map(() => make("td"))),
    (row, link) => cells(link).forEach((text, index) => say(row.cells[index], text)),
  );
  const kinds = new Map();
  for (const link of links) kinds.set(link.transport, (kinds.get(link.transport) ?? 0) + 1);
  say(get("links-sum"), links.length ? [...kinds].map(([kind, number]) => `${number} over ${kind}`).join(", ") : "no node pulls from another yet");
}

/** Asks before something is changed; a refusal can be overruled. */
function confirmed(title, text, verb, act) {
  const dialog = get("action-dialog");
  const error = get("action-error");
  say(get("action-title"), title);
  say(get("action-text"), text);
  say(get("action-do"), verb);
  error.hidden = get("force-label").hidden = true;
  get("force").checked = false;
  get("action-cancel").onclick = () => dialog.close();
  get("action-form").onsubmit = async (event) => {
    event.preventDefault();
    get("action-do").disabled = true;
    try {
      await act(get("force").checked);
      dialog.close();
    } catch (failed) {
      error.hidden = false;
      say(error, failed.message);
      get("force-label").hidden = failed.status !== 409;
    } finally {
      get("action-do").disabled = false;
    }
  };
  dialog.showModal();
}

function flip(node) {
  const role = node.role === "prefill" ? "decode" : "prefill";
  confirmed(
    `Move ${node.node_id} to the ${role} pool`,
    "It keeps its weights and its KV. What it has begun is finished, or goes on elsewhere.",
    "Move",
    async (force) => {
      await post("admin/role", { node: node.node_id, role, force });
      announce(`${node.node_id} is a ${role} node now`);
    },
  );
}

function drain(node) {
  confirmed(
    `Drain ${node.node_id}`,
    "Its streams go on at other nodes, or are finished here; then its process ends. What runs it may start it again: pdserve up does.",
    "Drain",
    async (force) => {
      await post("admin/drain", { node: node.node_id, force });
      announce(`${node.node_id} drains`);
    },
  );
}
