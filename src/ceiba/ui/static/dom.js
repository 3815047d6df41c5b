// Small helpers that make elements. Text goes in as text: nothing a model says is ever parsed as HTML.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  assign(element, attributes);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  assign(element, attributes);
  element.append(...children);
  return element;
}

function assign(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.setAttribute("class", value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !(element instanceof SVGElement)) element[name] = value;
    else element.setAttribute(name, value);
  }
}

export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}
