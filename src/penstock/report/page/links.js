// What travels between stages, and what that does to links.

function linksView() {
  const links = facts.links;
  if (!links) return { node: el("div", {}, view.title("Links"), absent("What travels is known once the program has sends and receives.")) };
  if (!links.edges.length) return { node: el("div", {}, view.title("Links"), absent("Nothing travels: one stage does it all.")) };
  const sizeOf = (edge) => edge.values.reduce((sum, [, , size]) => sum + size, 0);
  const times = (edge) => (edge.per === "batch" ? 1 : facts.schedule.microbatches);
  const uses = links.links.map(([name, bandwidth, size, busy]) => [name, { value: bandwidth ?? Infinity, node: bandwidth ? `${bytes(bandwidth)}/s` : "–" }, { value: size, node: bytes(size) },
    { value: busy, node: el("span", { class: "with-bar" }, percent(busy), bar([[busy, "busy"]], `busy ${percent(busy)}`)) }]);
  const rows = links.edges.map((edge) => [
    { value: edge.from * 1e4 + edge.to, node: el("span", { class: "way" }, stageChip(edge.from), "→", stageChip(edge.to)) },
    `${phaseName(edge.phase).toLowerCase()}`,
    { value: sizeOf(edge), node: `${bytes(sizeOf(edge))} per ${edge.per}` },
    { value: sizeOf(edge) * times(edge), node: bytes(sizeOf(edge) * times(edge)) },
    { value: edge.values.length, node: el("details", {}, el("summary", {}, plural(edge.values.length, "value")), edge.values.map(([name, type, size]) => el("div", {}, el("code", {}, `%${text(name)} : ${text(type)}`), el("small", {}, ` ${bytes(size)}`)))) },
  ]);
  return {
    node: el("div", {}, view.title("Links", "Values that go from stage to stage, and how busy the links between devices are, as predicted."),
      panel("", pipeline({ bytes: true })),
      panel("Edges", table([["from, to"], ["with"], ["size"], ["per batch", "number"], ["values"]], rows, { caption: "Edges", sortable: true })),
      panel("Links of the cluster", uses.length ? table([["link"], ["bandwidth", "number"], ["per batch", "number"], ["busy"]], uses, { caption: "Links", sortable: true }) : absent("No link was used in the simulation."))),
  };
}

// The stages in a row, forward values going to the right above them, gradients to the left below.
function pipeline() {
  const stages = facts.summary.stages, edges = facts.links ? facts.links.edges : [];
  const WIDTH = 148, GAP = 74, HEIGHT = 64, rise = (span) => 24 + 14 * Math.min(span, 6);
  const furthest = Math.max(1, ...edges.map((edge) => Math.abs(edge.from - edge.to)));
  const room = rise(furthest) + 14, width = stages.length * (WIDTH + GAP) - GAP + 8;
  const most = Math.max(1, ...edges.map((edge) => edge.values.reduce((sum, each) => sum + each[2], 0)));
  const picture = svg("svg", { class: "pipeline", viewBox: `0 0 ${width} ${HEIGHT + 2 * room}`, width, height: HEIGHT + 2 * room, role: "img",
    "aria-label": `${plural(stages.length, "stage")}; ${plural(edges.length, "edge")}` });
  for (const edge of edges) {
    const forward = edge.from < edge.to, size = edge.values.reduce((sum, each) => sum + each[2], 0), span = Math.abs(edge.from - edge.to);
    const right = (stage) => 4 + stage * (WIDTH + GAP) + WIDTH - 26, left = (stage) => 4 + stage * (WIDTH + GAP) + 26;
    const [x0, x1] = forward ? [right(edge.from), left(edge.to)] : [left(edge.from), right(edge.to)];
    const y = forward ? room : room + HEIGHT, peak = forward ? y - rise(span) : y + rise(span), end = forward ? y - 3 : y + 3;
    picture.append(svg("path", { class: `flow ${forward ? "kind-F" : "kind-B"}`, d: `M${x0},${y}C${x0},${peak} ${x1},${peak} ${x1},${end}`, "stroke-width": (1.5 + 2.5 * Math.sqrt(size / most)).toFixed(1) }),
      svg("path", { class: `tipped ${forward ? "kind-F" : "kind-B"}`, d: forward ? `M${x1 - 5},${y - 8}L${x1},${y}L${x1 + 5},${y - 8}Z` : `M${x1 - 5},${y + 8}L${x1},${y}L${x1 + 5},${y + 8}Z` }),
      svg("text", { class: "flow-text", x: (x0 + x1) / 2, y: forward ? y - rise(span) * 0.75 - 5 : y + rise(span) * 0.75 + 13 }, bytes(size)));
  }
  stages.forEach(([stage, devices], i) => {
    const x = 4 + i * (WIDTH + GAP);
    picture.append(svg("g", { class: `stagecard ${stageClass(stage)}`, transform: `translate(${x},${room})` }, svg("rect", { width: WIDTH, height: HEIGHT, rx: 9, class: "face" }), svg("rect", { x: 0, y: 0, width: 5, height: HEIGHT, rx: 2.5, class: "edge" }),
      svg("text", { x: 16, y: 27, class: "title" }, `stage ${stage}`), svg("text", { x: 16, y: 46, class: "under" }, clip(devices.join(", "), WIDTH))));
  });
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Pipeline" }, picture);
}
