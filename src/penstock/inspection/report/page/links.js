// What travels between stages, and what that does to links.

function linksView() {
  const links = facts.links;
  if (!links) return { node: el("div", {}, view.title("Links"), absent("What travels is known once the program has sends and receives.")) };
  if (!links.edges.length) return { node: el("div", {}, view.title("Links"), facts.sharding ? splitPanels() : absent("Nothing travels: one stage does it all.")) };
  const sizeOf = (edge) => edge.values.reduce((sum, [, , size]) => sum + size, 0);
  const times = (edge) => (edge.per === "batch" ? 1 : facts.schedule.microbatches);
  const uses = links.links.map(([name, bandwidth, size, busy]) => [name, { value: bandwidth ?? Infinity, node: bandwidth ? `${bytes(bandwidth)}/s` : "–" }, { value: size, node: bytes(size) },
    { value: busy, node: el("span", { class: "with-bar short" }, percent(busy), bar([[busy, "busy"]], `busy ${percent(busy)}`)) }]);
  const rows = links.edges.map((edge) => [
    { value: edge.from * 1e4 + edge.to, node: el("span", { class: "way" }, stageChip(edge.from), "→", stageChip(edge.to)) },
    `${phaseName(edge.phase).toLowerCase()}`,
    { value: sizeOf(edge), node: `${bytes(sizeOf(edge))} per ${edge.per}` },
    { value: sizeOf(edge) * times(edge), node: bytes(sizeOf(edge) * times(edge)) },
    { value: edge.values.length, node: el("details", {}, el("summary", {}, plural(edge.values.length, "value")), edge.values.map(([name, type, size]) => el("div", {}, el("code", {}, `%${text(name)} : ${text(type)}`), el("small", {}, ` ${bytes(size)}`)))) },
  ]);
  return {
    node: el("div", {}, view.title("Links", "Values that go from stage to stage, and how busy the links between devices are, as predicted."),
      panel("", pipeline()),
      panel("Edges", table([["from, to"], ["with"], ["size"], ["per batch", "number"], ["values"]], rows, { caption: "Edges", sortable: true })),
      panel("Links of the cluster", uses.length ? table([["link"], ["bandwidth", "number"], ["per batch", "number"], ["busy"]], uses, { caption: "Links", sortable: true }) : absent("No link was used in the simulation.")),
      facts.sharding ? splitPanels() : null),
  };
}

// How tensors are split over the devices of a stage, and what its ranks exchange for that.
function splitPanels() {
  const sharding = facts.sharding, over = (axes) => axes.join(", ");
  const planned = sharding.collectives.map(([graph, kind, axes, count, size, spent, exposed, reasons]) => [graph, kind, over(axes), { value: count, node: String(count) },
    { value: size, node: bytes(size) }, ...[spent, exposed].map((time) => ({ value: time ?? 0, node: time === null ? "–" : seconds(time) })),
    { value: reasons.length, node: el("details", {}, el("summary", {}, plural(reasons.length, "reason")), reasons.map((reason) => el("div", {}, text(reason)))) }]);
  const measured = (sharding.measured || []).map(([graph, kind, axes, count, size, spent, exposed]) => [graph, kind, over(axes), { value: count, node: String(count) },
    { value: size, node: bytes(size) }, { value: spent, node: seconds(spent) }, { value: exposed, node: seconds(exposed) }]);
  const tensors = sharding.tensors.map(([name, role, stage, whole, local, here, all]) => [el("code", {}, name), role, stage === null ? "–" : stageChip(stage),
    el("code", {}, whole), el("code", {}, local), { value: here, node: bytes(here) }, { value: all, node: bytes(all) }]);
  return el("div", {},
    panel("Collectives", el("p", { class: "hint" }, `Of one run of a graph, as predicted: ${sharding.meshes.join("; ")}.`),
      planned.length ? table([["graph"], ["collective"], ["over"], ["count", "number"], ["a rank sends", "number"], ["time", "number"], ["exposed", "number"], ["because"]], planned, { caption: "Collectives", sortable: true }) : absent("Ranks exchange nothing within a microbatch.")),
    measured.length ? panel("Collectives of the run", table([["graph"], ["collective"], ["over"], ["count", "number"], ["all ranks send", "number"], ["under way", "number"], ["exposed", "number"]], measured, { caption: "Collectives of the run", sortable: true })) : null,
    panel("Layouts", table([["tensor"], ["role"], ["stage"], ["whole type"], ["on a device"], ["there", "number"], ["whole", "number"]], tensors, { caption: "Layouts", sortable: true })));
}

// The stages in a row, as wide as there is room, forward values going to the right above them, gradients to the left below.
function pipeline(room = 1150) {
  const stages = facts.summary.stages, edges = facts.links ? facts.links.edges : [], ranks = facts.placement ? facts.placement.ranks : [];
  const grow = Math.max(1, Math.min(2.4, room / (stages.length * 148 + (stages.length - 1) * 86)));
  const WIDTH = Math.floor(148 * grow), GAP = Math.floor(86 * grow), HEIGHT = ranks.length ? 84 : 64, rise = (span) => 24 + 14 * Math.min(span, 6);
  // What goes the same way is one arrow.
  const arrows = new Map();
  for (const edge of edges) {
    const way = `${edge.from} ${edge.to}`, arrow = arrows.get(way) || { from: edge.from, to: edge.to, sizes: new Map() };
    arrow.sizes.set(edge.per, edge.values.reduce((sum, each) => sum + each[2], arrow.sizes.get(edge.per) || 0));
    arrows.set(way, arrow);
  }
  const sizeOf = (arrow) => Math.max(...arrow.sizes.values()), spanOf = (arrow) => Math.abs(arrow.from - arrow.to);
  const furthest = Math.max(1, ...[...arrows.values()].map(spanOf)), most = Math.max(1, ...[...arrows.values()].map(sizeOf));
  const above = Math.ceil(0.75 * rise(furthest)) + 22 + 13 * Math.max(0, ...[...arrows.values()].map((arrow) => arrow.sizes.size - 1)), width = stages.length * (WIDTH + GAP) - GAP + 8, height = HEIGHT + 2 * above;
  const picture = svg("svg", { class: "pipeline", viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `${plural(stages.length, "stage")}; ${plural(edges.length, "edge")}` });
  const right = (stage) => 4 + stage * (WIDTH + GAP) + WIDTH - 26, left = (stage) => 4 + stage * (WIDTH + GAP) + 26;
  for (const arrow of arrows.values()) {
    const forward = arrow.from < arrow.to, span = spanOf(arrow), kind = forward ? "kind-F" : "kind-B";
    const [x0, x1] = forward ? [right(arrow.from), left(arrow.to)] : [left(arrow.from), right(arrow.to)];
    const y = forward ? above : above + HEIGHT, peak = forward ? y - rise(span) : y + rise(span), end = forward ? y - 3 : y + 3;
    const told = [...arrow.sizes].map(([per, size]) => `${bytes(size)} per ${per}`);
    picture.append(svg("path", { class: `flow ${kind}`, d: `M${x0},${y}C${x0},${peak} ${x1},${peak} ${x1},${end}`, "stroke-width": (1.5 + 2.5 * Math.sqrt(sizeOf(arrow) / most)).toFixed(1) }),
      svg("path", { class: `tipped ${kind}`, d: forward ? `M${x1 - 5},${y - 8}L${x1},${y}L${x1 + 5},${y - 8}Z` : `M${x1 - 5},${y + 8}L${x1},${y}L${x1 + 5},${y + 8}Z` }),
      ...told.map((line, i) => svg("text", { class: "flow-text", x: (x0 + x1) / 2, y: forward ? y - rise(span) * 0.75 - 7 - 13 * (told.length - 1 - i) : y + rise(span) * 0.75 + 3 + 13 * (i + 1) }, line)));
  }
  stages.forEach(([stage, devices], i) => {
    const x = 4 + i * (WIDTH + GAP), own = ranks.filter((rank) => rank.stages.includes(stage));
    const cost = own.length ? `${seconds(Math.max(...own.map((rank) => rank.seconds)))}, ${bytes(Math.max(...own.map((rank) => rank.peak)))}` : "";
    picture.append(svg("g", { class: `stagecard ${stageClass(stage)}`, transform: `translate(${x},${above})` }, svg("rect", { width: WIDTH, height: HEIGHT, rx: 9, class: "face" }), svg("rect", { x: 0, y: 0, width: 5, height: HEIGHT, rx: 2.5, class: "edge" }),
      svg("text", { x: 16, y: 27, class: "title" }, `stage ${stage}`), svg("text", { x: 16, y: 46, class: "under" }, clip(devices.join(", "), WIDTH)), cost ? svg("text", { x: 16, y: 65, class: "under" }, svg("title", {}, "predicted time per batch, peak memory"), clip(cost, WIDTH)) : null));
  });
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Pipeline" }, picture);
}
