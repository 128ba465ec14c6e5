// Elements. Whatever comes from the facts becomes a text node or an attribute's value, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// el("p", {class: "note", onclick: f}, "text", node): an element of HTML.
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

// The same for SVG.
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// In place of what is in a node.
function put(node, ...children) {
  node.replaceChildren();
  return fill(node, {}, children);
}

const byId = (id) => document.getElementById(id);

// Says something to those who do not see.
function say(text) {
  byId("said").textContent = text;
}

// A share of a whole as the width of an element: styles go through the object model, which the content policy allows.
function sized(node, share) {
  node.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return node;
}

// ------------------------------------------------------------------------------------------ the tip

// What stands beside the pointer, or beside what has the focus. Lines are [label, value] pairs; the first is a heading.
function showTip(x, y, heading, lines) {
  const tip = byId("tip");
  const told = lines.filter(([, value]) => value !== null && value !== "").map(([label, value]) => [el("dt", {}, label), el("dd", {}, value)]);
  put(tip, el("strong", {}, heading), el("dl", {}, told));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth - 8 ? x - 14 - box.width : x + 14;
  const top = y + 14 + box.height > innerHeight - 8 ? y - 14 - box.height : y + 14;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}
