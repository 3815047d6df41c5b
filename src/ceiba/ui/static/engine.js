// The live view: polls the server's own state routes while it is open, and draws what they say.

import { ApiError, get, post } from "./api.js";
import { $, count, make, seconds, svg } from "./dom.js";
import * as tree from "./tree.js";

const EVERY = 1000;
const KEPT = 120;
const history = [];
let timer = null;
const TREE = "cache/tree?depth=16&width=24";
let treeShown = true; // until the server refuses; asked again when the view is opened

export function start() {
  $("flush").addEventListener("click", async () => {
    try {
      await post("flush_cache");
      treeShown = true;
      await tick();
    } catch (error) {
      tree.missing(error.message);
    }
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? pause() : !$("view-engine").hidden && open()));
}

export function open() {
  treeShown = true;
  if (timer === null) {
    timer = setInterval(tick, EVERY);
    tick();
  }
}

export function pause() {
  clearInterval(timer);
  timer = null;
}

async function tick() {
  let info;
  try {
    info = await get("server_info");
  } catch (error) {
    $("tiles").replaceChildren(make("p", { class: "empty" }, error.message));
    return;
  }
  const state = { ...info.stats, ...(info.internal_states?.[0] ?? {}) };
  let loads = [];
  try {
    loads = await get("v1/loads");
  } catch {}
  history.push({ at: Date.now(), throughput: state.gen_throughput ?? 0, running: state.running ?? 0, waiting: state.waiting ?? 0 });
  while (history.length > KEPT) history.shift();
  tiles(info, state);
  plot("throughput", [["throughput", "generated"]]);
  plot("requests", [["running", "running"], ["waiting", "waiting"]]);
  memory(state);
  batch(Array.isArray(loads) ? loads : [loads]);
  await showTree();
}

async function showTree() {
  if (!treeShown) return;
  try {
    tree.draw(await get(TREE));
  } catch (error) {
    treeShown = error.status === 0;
    if (error instanceof ApiError && error.status === 404) {
      tree.missing("This server does not show its prefix tree: it has no GET /cache/tree.");
    } else {
      tree.missing(error.message);
    }
  }
}

function tiles(info, state) {
  const usage = state.token_usage ?? 0;
  const cached = state.tokens_evictable ?? 0;
  const tile = (name, value, note, share) => {
    const made = make("div", { class: "tile" }, make("span", {}, name), make("strong", {}, value), make("small", {}, note));
    if (share !== undefined) {
      const fill = make("i");
      fill.style.width = `${Math.min(100, 100 * share)}%`;
      made.append(make("div", { class: "bar" }, fill));
    }
    return made;
  };
  const most = info.max_running_requests ?? state.max_running_requests ?? 0;
  $("tiles").replaceChildren(
    tile("Running", count(state.running ?? 0), `of ${count(most)}`, most ? (state.running ?? 0) / most : 0),
    tile("Waiting", count(state.waiting ?? 0), `${count(state.num_retracted_reqs ?? 0)} retracted`),
    tile("Tokens in use", `${(100 * usage).toFixed(1)}%`, `${count(cached)} more cached`, usage),
    tile("Cache hits", `${(100 * (state.cache_hit_rate ?? 0)).toFixed(1)}%`, "of prompt tokens, since start", state.cache_hit_rate ?? 0),
    tile("Throughput", (state.gen_throughput ?? 0).toFixed(1), "generated tokens/s"),
    tile("Uptime", seconds(info.uptime ?? 0), `${count(state.requests_finished ?? 0)} requests done`),
  );
}

function plot(id, series) {
  const top = Math.max(1, ...history.flatMap((entry) => series.map(([name]) => entry[name])));
  const x = (i) => ((KEPT - history.length + i) / (KEPT - 1)) * 100;
  const y = (value) => 40 - (value / top) * 38;
  const picture = svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none" });
  for (const level of [2, 21, 40]) picture.append(svg("line", { class: "grid", x1: 0, x2: 100, y1: level, y2: level }));
  series.forEach(([name], i) => {
    const points = history.map((entry, j) => `${x(j).toFixed(2)},${y(entry[name]).toFixed(2)}`);
    if (i === 0 && points.length > 1) {
      const area = `M${x(0)},40L${points.join("L")}L100,40Z`;
      picture.append(svg("path", { class: "area", d: area }));
    }
    picture.append(svg("polyline", { class: i ? "line second" : "line", points: points.join(" ") }));
  });
  const names = series.map(([name, words], i) =>
    make("span", { class: i ? "dot second" : "dot" }, `${words} ${format(history.at(-1)[name])}`),
  );
  const labels = make("div", { class: "plot-labels" }, make("span", {}, `peak ${format(top)}`), make("span", {}, ...names));
  $(id).replaceChildren(labels, picture);
}

const format = (value) => (Number.isInteger(value) ? count(value) : value.toFixed(1));

function memory(state) {
  const held = state.tokens_locked ?? 0;
  const flight = state.tokens_in_flight ?? 0;
  const parts = [
    ["held", "in use", held + flight],
    ["free", "cached", state.tokens_evictable ?? 0],
    ["rest", "free", state.tokens_free ?? 0],
  ];
  const total = parts.reduce((sum, [, , tokens]) => sum + tokens, 0) || 1;
  $("memory").replaceChildren(
    ...parts.map(([kind, , tokens]) => {
      const part = make("i", { class: `swatch-fill ${kind}` });
      part.style.flexGrow = tokens / total;
      if (kind !== "rest") part.style.background = getComputedStyle(document.querySelector(`.swatch.${kind}`)).backgroundColor;
      return part;
    }),
  );
  $("memory").setAttribute("aria-label", parts.map(([, words, tokens]) => `${count(tokens)} ${words}`).join(", "));
  $("memory-legend").replaceChildren(
    ...parts.flatMap(([kind, words, tokens]) => [make("span", { class: `swatch ${kind}` }), `${words} ${count(tokens)}`]),
  );
}

function batch(loads) {
  const row = (cells, tag = "td") => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  $("batch").replaceChildren(
    make(
      "table",
      {},
      row(["Replica", "Running", "Waiting", "Waiting tokens", "Tokens in use", "Token usage"], "th"),
      ...loads.map((load) =>
        row([
          String(load.dp_rank ?? 0),
          count(load.running ?? 0),
          count(load.waiting ?? 0),
          count(load.waiting_tokens ?? 0),
          count(load.tokens_used ?? 0),
          `${(100 * (load.token_usage ?? 0)).toFixed(1)}%`,
        ]),
      ),
    ),
  );
}
