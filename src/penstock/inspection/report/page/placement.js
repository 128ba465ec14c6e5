// Who runs what, and why: ranks with their share of time and memory, the planner's reasons, and what would change the plan.

function placementView() {
  const place = facts.placement;
  if (!place) return { node: el("div", {}, view.title("Placement"), absent("Nothing is placed and scheduled yet: this program has not come that far.")) };
  const slowest = Math.max(...place.ranks.map((rank) => rank.seconds), 1e-30);
  const rows = place.ranks.map((rank) => {
    const [busy, waiting, idle] = rank.use, whole = busy + waiting + idle || 1;
    return [
      { value: rank.rank, node: String(rank.rank) },
      { value: rank.stage, node: el("span", {}, rank.stages.map(stageChip)) },
      { value: rank.device, node: el("span", {}, rank.device, el("small", {}, `${rank.kind}, ${plural(rank.threads, "thread")}, ${amount(rank.flops, "FLOP/s")}`)) },
      { value: rank.starts_at || "", node: rank.starts_at || "–" },
      rank.share,
      { value: rank.seconds, node: el("span", { class: "with-bar" }, seconds(rank.seconds), bar([[rank.seconds / slowest, stageClass(rank.stage)]], `${percent(rank.seconds / slowest)} of the slowest`)) },
      { value: busy / whole, node: el("span", { class: "with-bar short" }, percent(busy / whole), bar([[busy / whole, "busy", "busy"], [waiting / whole, "waiting", "waiting"], [idle / whole, "idle", "idle"]],
        `busy ${percent(busy / whole)}, waiting ${percent(waiting / whole)}`)) },
      { value: rank.peak, node: el("span", { class: "with-bar" }, bytes(rank.peak), rank.capacity ? bar([[rank.peak / rank.capacity, stageClass(rank.stage)]], `${percent(rank.peak / rank.capacity)} of ${bytes(rank.capacity)}`) : null,
        rank.capacity ? el("small", {}, `of ${bytes(rank.capacity)}`) : null) },
      rank.in_flight,
    ];
  });
  const columns = [["rank"], ["stage"], ["device"], ["starts at", "code"], ["microbatches", "number"], ["time per batch"], ["busy"], ["peak memory"], ["in flight", "number"]];
  return {
    node: el("div", {}, view.title("Placement", "Which device runs which part of the model, and what that costs it, as predicted."),
      panel("Ranks", table(columns, rows, { caption: "Ranks", sortable: true })), reasons(place), whatIf(place)),
  };
}

function reasons(place) {
  const lines = place.notes.filter(([origin]) => !["fuse", "lifetimes"].includes(origin));
  const planner = place.planner;
  const told = [];
  if (planner) {
    const schedule = planner.formulas_of || place.schedule;
    if (planner.formulas_of) told.push(["planner", `${place.schedule} with several stages on a device was faster than ${schedule}, by simulation`]);
    for (const [kind, row] of Object.entries(planner.packs || {})) told.push(["packs", `${row.stages_on_a_device} stages on each device, ${kind}: ${seconds(row.step_s)} simulated${row.taken ? ", taken" : ""}`]);
    const gap = planner.bound_s ? 1 - planner.bound_s / planner.step_s : 0;
    told.push(["planner", `${seconds(planner.step_s)} per batch by its formulas, limited by ${planner.limited_by}; ` +
      (planner.proven ? `by these no plan of ${schedule} for what was given is faster`
        : `no plan of ${schedule} takes less than ${seconds(planner.bound_s)}, ${percent(gap)} less`)]);
    const usual = best(place);
    if (planner.passed_over) told.push(["planner", `by its formulas another plan of ${schedule} takes ${seconds(usual)}, ${planner.passed_over}`]);
    for (const [kind, step] of Object.entries(planner.schedules || {})) told.push(["schedule", `the best plan of ${kind} takes ${seconds(step)}`]);
    for (const [kind, why] of Object.entries(planner.refused || {})) told.push(["refused", `${kind}: ${why}`]);
    if (planner.left_out && planner.left_out.length) told.push(["left out", planner.left_out.join(", ")]);
  } else told.push(["planner", "was not asked: stages, devices and microbatches were given. compile --batch N lets it choose."]);
  return panel("Reasons", el("ul", { class: "reasons" }, [...told, ...lines].map(([origin, words]) => el("li", {}, el("span", { class: "origin" }, origin), el("span", {}, words)))));
}

// What changes are compared with: formulas with formulas, although another plan may have been chosen by simulation.
function best(place) {
  const usual = (place.planner.schedules || {})[place.planner.formulas_of || place.schedule];
  return usual === undefined ? place.planner.step_s : usual;
}

function whatIf(place) {
  const planner = place.planner;
  const changes = planner && planner.what_if ? Object.entries(planner.what_if) : [];
  if (!changes.length) return null;
  const usual = best(place);
  const most = Math.max(usual, ...changes.map(([, step]) => step || 0));
  const rows = changes.map(([name, step]) => [name, step === null ? "nothing fits" : seconds(step),
    step === null ? "" : el("span", { class: "with-bar long" }, step === usual ? "the same" : `${percent(Math.abs(step / usual - 1))} ${step > usual ? "slower" : "faster"}`,
      bar([[step / most, step > usual ? "slower" : "faster"]], name))]);
  return panel("What if", table([["change"], ["time per batch", "number"], ["by the formulas, against " + seconds(usual)]], rows, { caption: "What would change the plan" }));
}
