// The part of Markdown that models write most, as elements: paragraphs, lists, headings, code, emphasis.

import { make } from "./dom.js";

export function render(text) {
  const out = document.createDocumentFragment();
  const fences = text.split(/^```/m);
  fences.forEach((part, i) => {
    if (i % 2) {
      const end = part.indexOf("\n");
      out.append(make("pre", {}, make("code", {}, end < 0 ? "" : part.slice(end + 1).replace(/\n$/, ""))));
    } else {
      blocks(part.replace(/^\n/, ""), out);
    }
  });
  return out;
}

function blocks(text, out) {
  for (const block of text.split(/\n{2,}/)) {
    let run = [];
    let list = null;
    const flush = () => {
      if (run.length) out.append(make("p", {}, ...joined(run)));
      run = [];
    };
    for (const line of block.split("\n")) {
      const heading = line.match(/^#{1,6}\s+(.*)/);
      const item = line.match(/^\s*(?:([-*•])|(\d+)[.)])\s+(.*)/);
      if (heading || item) flush();
      if (heading) {
        list = null;
        out.append(make("h3", {}, ...inline(heading[1])));
      } else if (item) {
        const tag = item[1] ? "ul" : "ol";
        if (!list || list.localName !== tag) {
          list = make(tag, tag === "ol" ? { start: Number(item[2]) } : {});
          out.append(list);
        }
        list.append(make("li", {}, ...inline(item[3])));
      } else if (line.trim()) {
        list = null;
        run.push(line);
      }
    }
    flush();
  }
}

function joined(lines) {
  return lines.flatMap((line, i) => (i ? [document.createElement("br"), ...inline(line)] : inline(line)));
}

function inline(text) {
  const parts = [];
  const pattern = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*/g;
  let last = 0;
  for (const match of text.matchAll(pattern)) {
    parts.push(text.slice(last, match.index));
    const [tag, inner] = match[1] ? ["code", match[1]] : match[2] ? ["strong", match[2]] : ["em", match[3]];
    parts.push(make(tag, {}, inner));
    last = match.index + match[0].length;
  }
  parts.push(text.slice(last));
  return parts.filter((part) => part !== "");
}
