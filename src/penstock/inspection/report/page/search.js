// Search over everything that has a name: operations, source nodes, variables, kernels, passes.

const MOST_FOUND = 40;

function searchIndex() {
  const entries = [];
  for (const op of operations) {
    if (QUIET.has(op.kind)) continue;
    entries.push({ sort: "operation", name: titleOf(op), about: `${op.kind} · ${phaseName(op.graph.kind).toLowerCase()}${op.stage >= 0 ? ` · stage ${op.stage}` : ""}`, words: `${titleOf(op)} ${op.kind} ${op.loc} ${op.kernel}`.toLowerCase(), open: () => openOperation(op) });
  }
  const known = new Set();
  for (const op of operations) {
    if (!op.variable || known.has(op.variable)) continue;
    known.add(op.variable);
    const reader = operations.find((each) => each.kind === "read" && each.variable === op.variable) || op;
    const taker = (phases.get(reader.graph.kind).takers.get(reader.outs[0]) || [])[0] || reader;
    entries.push({ sort: "variable", name: `@${op.variable}`, about: "variable", words: op.variable.toLowerCase(), open: () => openOperation(taker) });
  }
  for (const row of facts.kernels ? facts.kernels.rows : []) {
    const about = row.ops.slice(0, 5).map(([kind]) => text(kind)).join(" ");
    entries.push({ sort: "kernel", name: `${row.graph}/${row.names[0]}`, about, words: `${row.names.map((name) => `${row.graph}/${name}`).join(" ")} ${about}`.toLowerCase(), open: () => openKernel({ graph: { name: row.graph }, kernel: row.names[0] }) });
  }
  (facts.passes || []).forEach((pass, index) => entries.push({ sort: "pass", name: `${pass.number}. ${pass.name}`, about: pass.does, words: `${pass.call} ${pass.does}`.toLowerCase(), open: () => openPass(index) }));
  return entries;
}

// Whole names first, then what begins so, then what has all the words.
function find(entries, wanted) {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean), whole = words.join(" ");
  if (!words.length) return [];
  const scored = [];
  for (const entry of entries) {
    if (!words.every((word) => entry.words.includes(word))) continue;
    const name = entry.name.toLowerCase().replace(/^@/, "");
    scored.push([name === whole ? 0 : entry.sort === "pass" && name.endsWith(whole) ? 1 : name.startsWith(whole) ? 2 : name.includes(whole) ? 3 : 4, entry]);
  }
  return scored.sort((a, b) => a[0] - b[0] || a[1].name.length - b[1].name.length).map(([, entry]) => entry);
}

function startSearch() {
  const field = byId("search"), list = byId("found");
  let entries = null, found = [], at = -1;

  function close() {
    list.hidden = true;
    field.setAttribute("aria-expanded", "false");
    field.removeAttribute("aria-activedescendant");
  }

  function choose(entry) {
    close();
    field.value = "";
    field.blur();
    entry.open();
  }

  function mark(next) {
    at = found.length ? (next + found.length) % found.length : -1;
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", String(i === at)));
    const item = list.children[at];
    if (item) {
      item.scrollIntoView({ block: "nearest" });
      field.setAttribute("aria-activedescendant", item.id);
    }
  }

  field.addEventListener("input", () => {
    entries ||= searchIndex();
    const all = find(entries, field.value);
    found = all.slice(0, MOST_FOUND);
    put(list, ...found.map((entry, i) => el("div", { role: "option", id: `found-${i}`, "aria-selected": "false", onpointerdown: (event) => {
      event.preventDefault();
      choose(entry);
    } }, el("span", { class: `sort sort-${entry.sort}` }, entry.sort), el("span", { class: "found-name" }, entry.name), el("small", {}, entry.about))));
    if (field.value.trim() && !found.length) list.append(el("p", { class: "absent" }, "Nothing is called that."));
    if (all.length > found.length) list.append(el("p", { class: "absent" }, `${(all.length - found.length).toLocaleString("en")} more: write more of the name`));
    list.hidden = !field.value.trim();
    field.setAttribute("aria-expanded", String(!list.hidden));
    mark(0);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") mark(at + 1);
    else if (event.key === "ArrowUp") mark(at - 1);
    else if (event.key === "Enter" && found[at] && !list.hidden) choose(found[at]);
    else if (event.key === "Escape") {
      if (list.hidden) field.blur();
      close();
      event.stopPropagation();
    } else return;
    event.preventDefault();
  });
  field.addEventListener("blur", close);
}
