// The prefix tree as a picture: from left to right the tokens, each box a stretch of tokens that requests share.

import { $, count, make, seconds, svg } from "./dom.js";

const ROW = 24;
const WIDTH = 1000;
const MOST_ROWS = 120;

/** `answer`: what GET /cache/tree gave, as {nodes: [{id, parent, tokens, locks, …}]} or nested by `children`. */
export function draw(answer) {
  const root = rooted(answer);
  if (!root || !root.children.length) {
    $("tree").replaceChildren(make("p", { class: "empty" }, "Nothing is cached yet."));
    return;
  }
  measure(root, 0);
  const rows = Math.min(root.leaves, MOST_ROWS);
  const height = rows * ROW;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, height, preserveAspectRatio: "none" });
  const shown = { rows: MOST_ROWS, nodes: 0 };
  let row = 0;
  for (const child of root.children) row += place(child, row, root.depth, picture, shown);
  $("tree").replaceChildren(picture);
  fit(picture);
  const total = answer.num_nodes ?? root.size - 1;
  $("tree-note").textContent =
    `${count(total)} stretches, ${count(answer.num_tokens ?? root.total)} tokens` +
    (shown.nodes < total ? `, ${count(shown.nodes)} shown` : "");
}

export function missing(message) {
  $("tree").replaceChildren(make("p", { class: "empty" }, message));
  $("tree-note").textContent = "";
}

function rooted(answer) {
  if (Array.isArray(answer.nodes)) {
    const byId = new Map();
    const root = { tokens: 0, children: [] };
    for (const node of answer.nodes) byId.set(node.id, plain(node));
    for (const node of answer.nodes) {
      const own = byId.get(node.id);
      const parent = byId.get(node.parent);
      if (parent) parent.children.push(own);
      else if (own.tokens) root.children.push(own);
      else byId.set(node.id, Object.assign(own, root)) && Object.assign(root, own);
    }
    return root;
  }
  const top = answer.root ?? answer.tree ?? answer;
  return top ? nested(top) : null;
}

function nested(node) {
  const own = plain(node);
  own.children = (node.children ?? []).map(nested);
  return own;
}

function plain(node) {
  return {
    tokens: node.tokens ?? node.num_tokens ?? node.length ?? 0,
    locks: node.locks ?? node.lock_ref ?? node.lock ?? 0,
    pinned: Boolean(node.pinned ?? node.pins),
    hits: node.hits ?? node.hit_count,
    age: node.age ?? node.idle_seconds,
    text: node.text ?? node.preview ?? "",
    children: [],
  };
}

function measure(node, start) {
  node.start = start;
  node.depth = start + node.tokens;
  node.leaves = 0;
  node.size = 1;
  node.total = node.tokens;
  for (const child of node.children) {
    measure(child, start + node.tokens);
    node.leaves += child.leaves;
    node.size += child.size;
    node.total += child.total;
    node.depth = Math.max(node.depth, child.depth);
  }
  node.leaves ||= 1;
  node.children.sort((a, b) => b.total - a.total);
}

// Square roots of positions: a short question after a long handbook stays visible.
const at = (tokens, depth) => WIDTH * Math.sqrt(tokens / Math.max(1, depth));

function place(node, row, depth, picture, shown) {
  if (row >= shown.rows) return node.leaves;
  const rows = Math.min(node.leaves, shown.rows - row);
  const x = at(node.start, depth);
  const width = Math.max(2, at(node.start + node.tokens, depth) - x);
  const kind = node.pinned ? "pinned" : node.locks ? "held" : "free";
  const box = svg("rect", { x, y: row * ROW, width, height: rows * ROW, class: kind });
  box.append(svg("title", {}, describe(node)));
  const label = svg("text", { x: x + 7, y: row * ROW + (rows * ROW) / 2 + 4 });
  label.dataset.words = `${count(node.tokens)}  ${node.text.replace(/\s+/g, " ").trim()}`;
  label.dataset.width = width;
  picture.append(box, label);
  shown.nodes += 1;
  let below = row;
  for (const child of node.children) below += place(child, below, depth, picture, shown);
  return node.leaves;
}

/** Put as much of each label as its box can take, now that the picture's real width is known. */
function fit(picture) {
  const scale = picture.clientWidth / WIDTH || 1;
  for (const label of picture.querySelectorAll("text")) {
    const room = Math.floor((label.dataset.width * scale - 12) / 6.6);
    const words = label.dataset.words;
    label.textContent = room < 2 ? "" : words.length > room ? `${words.slice(0, room - 1)}…` : words;
    label.setAttribute("transform", `translate(${label.getAttribute("x")} 0) scale(${1 / scale} 1) translate(${-label.getAttribute("x")} 0)`);
  }
}

function describe(node) {
  const lines = [`${count(node.tokens)} tokens, from position ${count(node.start)}`];
  lines.push(node.locks ? `in use by ${node.locks}` : "free to evict");
  if (node.hits !== undefined) lines.push(`${count(node.hits)} hits`);
  if (node.age !== undefined) lines.push(`last used ${seconds(node.age)} ago`);
  if (node.text) lines.push(node.text);
  return lines.join("\n");
}
