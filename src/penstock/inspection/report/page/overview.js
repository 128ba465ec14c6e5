// The report on one screen: what the model is, who runs it, how fast, with how much memory, and what limits it.

function overviewView() {
  const summary = facts.summary, ranks = facts.placement ? facts.placement.ranks : [];
  const peak = Math.max(0, ...ranks.map((rank) => rank.peak));
  const tile = (name, value, under) => el("div", { class: "tile" }, el("span", {}, name), el("strong", {}, value), el("small", {}, under || ""));
  const tiles = [
    summary.step ? tile("Time per batch", seconds(summary.step), `${(summary.samples / summary.step).toPrecision(4)} samples/s, predicted`) : null,
    summary.step ? tile("Busy", percent(summary.busy), "of all ranks' time, in a long run") : null,
    ranks.length ? tile("Peak memory", bytes(peak), `largest of ${plural(ranks.length, "device")}`) : null,
    tile("Parameters", count(summary.parameters), `${bytes(summary.parameter_bytes)} in ${plural(summary.parameter_tensors, "tensor")}`),
    tile("Operations", summary.operations.toLocaleString("en"), facts.kernels ? plural(facts.kernels.rows.length, "different kernel") : plural(facts.graph.graphs.length, "graph")),
  ];
  const parts = [
    summary.schedule ? `schedule ${summary.schedule}, ${plural(summary.microbatches, "microbatch")} per batch` : null,
    summary.stages.length ? `${plural(summary.stages.length, "stage")} on ${plural(new Set(summary.stages.flatMap(([, devices]) => devices)).size, "device")}` : null,
    summary.precision ? `computed in ${summary.precision}` : null,
    summary.wire && summary.wire !== summary.precision ? `${summary.wire} on the wire` : null,
    summary.recompute ? `recomputation ${summary.recompute}` : null,
  ].filter(Boolean);
  const slowest = Math.max(...ranks.map((rank) => rank.seconds), 1e-30);
  const room = Math.max(...ranks.map((rank) => rank.peak), 1);
  return {
    node: el("div", {}, view.title(summary.model, parts.join(" · ")),
      facts.failure ? el("div", { class: "failure", role: "alert" }, el("strong", {}, "The pipeline stopped"), el("pre", {}, facts.failure)) : null,
      el("div", { class: "tiles" }, tiles),
      // Two stages leave room beside them.
      el("div", { class: summary.stages.length === 2 ? "columns" : "" },
        summary.stages.length > 1 ? panel("Pipeline", pipeline(summary.stages.length === 2 ? 540 : 1150)) : null,
        summary.bound_by ? panel("What limits it", el("p", { class: "verdict" }, summary.bound_by), criticalPath(summary.path)) : null),
      ranks.length ? panel("Devices", table([["rank"], ["stage"], ["time per batch"], ["peak memory"]], ranks.map((rank) => [rank.rank, el("span", {}, rank.stages.map(stageChip)),
        el("span", { class: "with-bar" }, seconds(rank.seconds), bar([[rank.seconds / slowest, stageClass(rank.stage)]], `${percent(rank.seconds / slowest)} of the slowest`)),
        el("span", { class: "with-bar" }, bytes(rank.peak), bar([[rank.peak / room, stageClass(rank.stage)]], `${percent(rank.peak / room)} of the largest`))]), { caption: "Devices" })) : null,
      summary.rungs.length ? sizesPanel(summary) : null,
      el("div", { class: "columns" },
        panel("Inputs and outputs", el("ul", { class: "plain" }, summary.inputs.map(([name, type]) => el("li", {}, el("code", {}, `%${name} : ${type}`))), summary.outputs.map((name) => el("li", {}, "gives ", el("code", {}, `%${name}`))))),
        panel("Checked after every pass", summary.facts.length ? el("ul", { class: "plain ticks" }, summary.facts.map((fact) => el("li", {}, fact))) : absent("nothing yet")))),
  };
}

// The sizes that there is code for. Of turns: what one of each size computes, writes to caches, and reads at most.
function sizesPanel(summary) {
  const turns = summary.rungs.some(([, , turn]) => turn);
  const columns = [[turns ? "rows of a turn" : "sizes with code"], ["predicted time"], ...(turns ? [["sequences"], ["written to caches"], ["read of caches"], ["in blocks"]] : [])];
  const rows = summary.rungs.map(([sizes, spent, turn]) => [el("code", {}, sizes), spent === null ? "" : seconds(spent),
    ...(turn ? [`up to ${turn[1]}`, bytes(turn[2]), `up to ${bytes(turn[4])}`, `up to ${turn[3]}`] : turns ? ["", "", "", ""] : [])]);
  return panel(turns ? "Turns" : "Sizes", el("div", {}, table(columns, rows, { caption: "Sizes that a bounded dimension has code for" }),
    summary.caches ? el("p", { class: "hint" }, `Caches: ${plural(summary.caches[0], "block")} of ${summary.caches[1]} positions, ${bytes(summary.caches[2])}; a token takes ${bytes(summary.caches[3])}. A turn reads most where all its sequences are as long as the context.`) : null));
}

// What the end of a batch has to wait for, in seconds, as parts of one bar.
function criticalPath(path) {
  const parts = Object.entries(path || {}), whole = parts.reduce((sum, [, spent]) => sum + spent, 0);
  if (!whole) return null;
  const kindOf = (what) => {
    const rank = /^computing on rank (\d+)/.exec(what);
    return rank ? stageClass(facts.placement.ranks[Number(rank[1])].stage) : "waiting";
  };
  return el("div", { class: "path" }, el("p", { class: "hint" }, "The critical path of a batch:"), bar(parts.map(([what, spent]) => [spent / whole, kindOf(what), `${what} ${percent(spent / whole)}`]), "critical path"),
    el("ul", { class: "keys" }, parts.slice(0, 6).map(([what, spent]) => el("li", { class: "key" }, el("i", { class: `swatch ${kindOf(what)}` }), `${what} ${percent(spent / whole)}`))));
}
