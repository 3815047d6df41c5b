// The prefix tree as a picture: from left to right the tokens, each box a stretch of tokens that requests share.

import { $, count, make, svg } from "./dom.js";

const ROW = 24;
const WIDTH = 1000;
const MOST_ROWS = 120;

/** `answer`: what GET /cache/tree gave. */
export function draw(answer) {
  const root = { tokens: 0, children: answer.namespaces.flatMap((space) => space.children.map((node) => plain(node, space))) };
  if (!root.children.length) {
    missing("Nothing is cached yet.");
    return;
  }
  measure(root, 0);
  const rows = Math.min(root.leaves, MOST_ROWS);
  const height = rows * ROW;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, height, preserveAspectRatio: "none" });
  const shown = { rows, nodes: 0 };
  let row = 0;
  for (const child of root.children) row += place(child, row, root.depth, picture, shown);
  $("tree").replaceChildren(picture);
  fit(picture);
  $("tree-note").textContent =
    `${count(answer.tokens)} tokens in ${count(answer.nodes)} stretches` +
    (shown.nodes < answer.nodes ? `, the largest ${count(shown.nodes)} shown` : "");
}

export function missing(message) {
  $("tree").replaceChildren(make("p", { class: "empty" }, message));
  $("tree-note").textContent = "";
}

function plain(node, space) {
  return {
    ...node,
    space: space.namespace,
    text: node.text ?? "",
    children: node.children.map((child) => plain(child, space)),
  };
}

function measure(node, start) {
  node.start = start;
  node.depth = start + node.tokens;
  node.leaves = 0;
  node.total = node.tokens;
  for (const child of node.children) {
    measure(child, start + node.tokens);
    node.leaves += child.leaves;
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
  const kind = node.pins ? "pinned" : node.locks ? "held" : "free";
  const box = svg("rect", { x, y: row * ROW, width, height: rows * ROW, class: kind });
  box.append(svg("title", {}, describe(node)));
  const label = svg("text", { x: x + 7, y: row * ROW + (rows * ROW) / 2 + 4 });
  const more = node.tokens > (node.token_ids?.length ?? 0) ? "…" : "";
  label.dataset.words = `${count(node.tokens)} · ${node.text.replace(/\s+/g, " ").trim()}${more}`;
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
  const lines = [`${count(node.tokens)} tokens, from position ${count(node.start)}, ${count(node.hits)} hits`];
  lines.push(node.locks ? `in use by ${node.locks}` : node.pins ? "pinned" : "free to evict");
  if (node.children_omitted) lines.push(`${count(node.children_omitted)} more branches not shown`);
  if (node.space) lines.push(`namespace ${node.space}`);
  return [...lines, node.text].join("\n");
}
