// What views are made of: panels, tables, choices, bars.

const view = { title: (name, about) => el("header", { class: "lead" }, el("h2", {}, name), about ? el("p", {}, about) : null) };

function panel(title, ...children) {
  return el("section", { class: "panel" }, title ? el("h3", {}, title) : null, children);
}

const absent = (what) => el("p", { class: "absent" }, what);

// Rows of cells under a header; a cell is text, a node, or {value, node} where it is sorted by value. Columns are [name, class].
function table(columns, rows, { caption, sortable = false } = {}) {
  const body = el("tbody");
  const draw = (listed) => put(body, ...listed.map((row) => {
    const cells = row.map((cell, i) => el("td", { class: columns[i][1] }, cell !== null && typeof cell === "object" && "value" in cell ? cell.node : cell));
    return el("tr", {}, cells);
  }));
  const heads = columns.map(([name, kind], i) => {
    if (!sortable) return el("th", { scope: "col", class: kind }, name);
    const head = el("th", { scope: "col", class: kind, "aria-sort": "none" });
    head.append(el("button", { type: "button", onclick: () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (cell) => (cell !== null && typeof cell === "object" && "value" in cell ? cell.value : cell);
      const order = (a, b) => (key(a[i]) < key(b[i]) ? -1 : key(a[i]) > key(b[i]) ? 1 : 0) * (down ? -1 : 1);
      draw([...rows].sort(order));
    } }, name));
    return head;
  });
  draw(rows);
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption || "table" },
    el("table", {}, caption ? el("caption", { class: "unseen" }, caption) : null, el("thead", {}, el("tr", {}, heads)), body));
}

// A bar of parts, [share, class, told], of which the shares add up to at most 1.
function bar(parts, label) {
  return el("div", { class: "meter", role: "img", "aria-label": label },
    parts.map(([share, kind, told]) => sized(el("span", { class: kind, title: told }), share)));
}

// One of a few: a group of radio buttons that look like one switch. `choose` is called with the value.
let choices = 0;
function choice(label, options, chosen, choose) {
  const name = `choice-${choices++}`;
  return el("fieldset", { class: "choice" }, el("legend", { class: "unseen" }, label),
    options.map(([value, told]) => el("label", {},
      el("input", { type: "radio", name, value, checked: value === chosen, onchange: () => choose(value) }), el("span", {}, told))));
}

const button = (label, act, attributes = {}) => el("button", { type: "button", onclick: act, ...attributes }, label);

// The first `size` of many nodes, and a button for more.
function several(items, show, size = 200) {
  const box = el("div", { class: "several" });
  let shown = 0;
  const more = button("", () => add());
  function add() {
    const next = items.slice(shown, shown + size).map(show);
    more.before(...next);
    shown += next.length;
    more.hidden = shown >= items.length;
    more.textContent = `${(items.length - shown).toLocaleString("en")} more`;
  }
  box.append(more);
  add();
  return box;
}

// The words of a program in colours; comments, strings, numbers, words of the language.
const WORDS = /(#[^\n]*|\/\/[^\n]*)|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|\b(\d[\w.]*)|\b(for|in|if|else|with|def|return|class|import|from|as|while|and|or|not|void|float|int|const|extern|template|struct|__global__|__shared__)\b/g;
function program(source) {
  const code = el("code");
  let at = 0;
  for (const match of source.matchAll(WORDS)) {
    const kind = match[1] ? "comment" : match[2] ? "string" : match[3] ? "number" : "word";
    code.append(source.slice(at, match.index), el("span", { class: kind }, match[0]));
    at = match.index + match[0].length;
  }
  code.append(source.slice(at));
  return el("pre", { class: "program", tabindex: 0 }, code);
}
