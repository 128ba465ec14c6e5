// Everything about one operation, from its place in the source to its kernel: a drawer that any view may open.

let opener = null;

function showOperation(op) {
  const phase = phases.get(op.graph.kind), drawer = byId("details");
  const jump = (label, act) => el("button", { type: "button", class: "link", onclick: act }, label);
  const valueLine = (value) => {
    const maker = phase.makers.get(value);
    return el("li", {}, maker ? jump(`%${valueName(value)}`, () => openOperation(maker)) : el("code", {}, `%${valueName(value)}`), el("small", {}, ` ${valueType(value)} · ${bytes(values[value][2])}`));
  };
  const takers = [...new Set(op.outs.flatMap((value) => phase.takers.get(value) || []))];
  const passes = [...new Map(op.outs.flatMap((value) => touched.get(values[value][0]) || []).map((each) => [each.index, each])).values()].sort((a, b) => a.index - b.index);
  const places = (facts.placement ? facts.placement.ranks : []).filter((rank) => rank.stages.includes(op.stage));
  const sent = (facts.links ? facts.links.edges : []).flatMap((edge) => edge.values.filter(([name]) => op.outs.some((value) => values[value][0] === name)).map(([, , size]) => `${edge.from} → ${edge.to}: ${bytes(size)} per ${edge.per}`));
  const saved = op.outs.filter((value) => op.graph.saved.includes(value)).reduce((sum, value) => sum + values[value][2], 0);
  const kernel = facts.kernels && op.kernel && facts.kernels.rows.find((row) => row.graph === op.graph.name && row.names.includes(op.kernel));
  const entry = (name, ...content) => (content.flat(2).filter(Boolean).length ? [el("dt", {}, name), el("dd", {}, content)] : []);
  put(drawer,
    el("div", { class: "drawer-head" }, el("h2", { tabindex: -1 }, op.kind), el("button", { type: "button", class: "quiet", "aria-label": "Close details", onclick: closeDetails }, "✕")),
    el("p", { class: "drawer-name" }, el("code", {}, op.outs.map((value) => `%${valueName(value)}`).join(", ") || `@${op.variable}`)),
    el("dl", { class: "chain" },
      entry("Source", op.loc ? el("code", {}, op.loc) : null),
      entry("Graph", `${phaseName(op.graph.kind)} (@${op.graph.name})`),
      entry("Attributes", op.rest ? el("code", {}, op.rest) : null),
      entry("Variable", op.variable ? el("code", {}, `@${op.variable}`) : null),
      entry("Takes", op.ins.length ? el("ul", {}, op.ins.map(valueLine)) : null),
      entry("Gives", op.outs.length ? el("ul", {}, op.outs.map((value) => el("li", {}, el("code", {}, valueType(value)), el("small", {}, ` · ${bytes(values[value][2])}`)))) : null),
      entry("Taken by", takers.length ? el("ul", {}, takers.slice(0, 12).map((taker) => el("li", {}, jump(`${taker.kind} · ${titleOf(taker)}`, () => openOperation(taker)))), takers.length > 12 ? el("li", {}, `and ${takers.length - 12} more`) : null) : null),
      entry("Passes", passes.length ? el("ul", {}, passes.map(({ index, mark }) => el("li", {}, el("span", { class: `mark-${mark === "-" ? "−" : mark}` }, mark === "-" ? "−" : mark), " ",
        jump(`${facts.passes[index].number}. ${facts.passes[index].name}`, () => openPass(index, op.outs.length ? valueName(op.outs[0]) : ""))))) : null),
      entry("Stage", op.stage >= 0 ? stageChip(op.stage) : null),
      entry("Why there", places.length ? reasonOf(op.stage) : null),
      entry("Kernel", kernel ? [jump(`${op.graph.name}/${op.kernel}`, () => openKernel(op)), el("small", {}, ` ${seconds(kernel.measured ?? kernel.roofline)} per call, ${kernel.measured ? "measured" : "by the roofline"}`)] : op.kernel ? `${op.kernel}: computed where it is read` : null),
      entry("Kept", saved ? `${bytes(saved)} of a microbatch, for the backward` : null),
      entry("Travels", sent.length ? el("ul", {}, sent.map((line) => el("li", {}, line))) : null)),
    button("Show in the graph", () => openOperation(op), { class: "wide" }));
  if (drawer.hidden) opener = document.activeElement;
  drawer.hidden = false;
  document.body.classList.add("with-details");
  say(`${op.kind} ${titleOf(op)}`);
}

// What the partition said of a stage.
function reasonOf(stage) {
  const note = facts.placement.notes.find(([origin, words]) => origin === "partition" && words.startsWith(`stage ${stage} `));
  return note ? note[1] : null;
}

function closeDetails() {
  const drawer = byId("details");
  if (drawer.hidden) return false;
  drawer.hidden = true;
  document.body.classList.remove("with-details");
  if (opener && opener.isConnected) opener.focus();
  opener = null;
  return true;
}
