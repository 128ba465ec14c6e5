// Why this plan: what binds, what each device contributes and which one hurts, what each alternative would cost, and the reasons.

// What each device does for the plan, in words.
const EFFECTS = {
  needed: "needed: without it nothing fits", helps: "helps", little: "hardly changes a batch", hurts: "hurts: with it a batch takes longer",
  unfit: "no plan that uses it fits", unknown: "not known: no such plan was found or searched",
};

function whyView() {
  const place = facts.placement;
  const head = (about) => view.title("Why this plan", about);
  if (!place) return { node: el("div", {}, head(), absent("Nothing is placed and scheduled yet: this program has not come that far.")) };
  if (!place.planner) {
    return { node: el("div", {}, head("It was given by hand, and nothing was searched."), binds(place),
      panel("Alternatives", el("p", { class: "absent" }, "Stages, devices and microbatches were given, so no other plan was compared with this one. compile --batch N lets the planner choose and compare.")), reasons(place)) };
  }
  return { node: el("div", {}, head("It was searched for. Figures are those of the planner's formulas, unless they are called simulated."),
    binds(place), contributions(place), alternatives(place), whatIf(place), reasons(place)) };
}

function binds(place) {
  const planner = place.planner, lines = [["program", `simulated, ${seconds(facts.summary.step)} per batch, limited by ${facts.summary.bound_by}`]];
  if (planner) {
    const schedule = planner.formulas_of || place.schedule;
    lines.push(["formulas", `${seconds(planner.step_s)} per batch, limited by ${planner.limited_by}`]);
    lines.push(["bound", planner.proven ? `by the formulas no plan of ${schedule} for what was given is faster`
      : `no plan of ${schedule} takes less than ${seconds(planner.bound_s)}` + (planner.bound_s > 0 ? `, so this one is at most ${percent(planner.step_s / planner.bound_s - 1)} above the best` : "")]);
    if (planner.stopped) lines.push(["stopped", "the search was interrupted: this is the best plan until then, and others were not compared with it"]);
  }
  return panel("What binds", told(lines));
}

function contributions(place) {
  const listed = place.planner.devices || [];
  if (!listed.length) return panel("Devices", absent(place.planner.stopped ? "What devices contribute was not searched: the search was interrupted." : "This plan does not say what devices contribute: they are too many for a bundle, or it was compiled before plans said so."));
  const spent = (name) => place.ranks.filter((rank) => rank.device === name).reduce((sum, rank) => sum + rank.seconds, 0);
  const rows = listed.map((row) => [row.device, row.used ? "yes" : "no", { value: spent(row.device), node: row.used ? seconds(spent(row.device)) : "–" },
    seconds(row.step_without_s), seconds(row.step_with_s), row.gain === null ? "–" : signed(row.gain),
    el("span", {}, EFFECTS[row.effect] || row.effect, row.reason ? el("small", {}, row.reason) : null)]);
  const hurting = listed.filter((row) => row.effect === "hurts");
  const verdict = !hurting.length ? (listed.some((row) => row.effect === "unknown") ? "No device is known to hurt." : "No device hurts.")
    : hurting.map((row) => (row.used ? `${row.device} hurts: by the formulas a batch takes ${seconds(row.step_without_s)} without it. ` : `${row.device} would hurt, and is left out. `));
  return panel("Devices", el("p", { class: "verdict" }, verdict),
    table([["device"], ["used"], ["its time per batch", "number"], ["a batch without it", "number"], ["a batch with it", "number"], ["gain", "number"], ["so it"]], rows, { caption: "What each device contributes" }),
    el("p", { class: "hint" }, "The gain is a batch without the device over one with it, less one, each the best plan by the formulas."));
}

// Schedules and packs: by the formulas and simulated, and those that passes refused.
function alternatives(place) {
  const planner = place.planner, simulated = planner.simulated || {}, refused = planner.refused || {};
  const rows = Object.entries(planner.schedules).map(([kind, step]) => [kind, "1", seconds(step), kind in simulated ? (simulated[kind] === null ? "none fits" : seconds(simulated[kind])) : "–",
    kind in refused ? `refused: ${refused[kind]}` : kind === place.schedule && !planner.formulas_of ? "taken" : ""]);
  for (const [kind, row] of Object.entries(planner.packs || {})) rows.push([kind, String(row.stages_on_a_device), "–", seconds(row.step_s), kind in refused ? `refused: ${refused[kind]}` : row.taken ? "taken" : ""]);
  return panel("Schedules", table([["schedule"], ["stages on a device", "number"], ["formulas", "number"], ["simulated", "number"], [""]], rows, { caption: "The best plan of each schedule" }));
}

// What changes are compared with: formulas with formulas, although another plan may have been chosen by simulation.
function best(place) {
  const usual = (place.planner.schedules || {})[place.planner.formulas_of || place.schedule];
  return place.planner.against_s || (usual === undefined ? place.planner.step_s : usual);
}

function whatIf(place) {
  const planner = place.planner, changes = Object.entries(planner.what_if || {});
  if (!changes.length) return null;
  const usual = best(place), unsure = planner.unsure || [], least = planner.no_less_s || {};
  const most = Math.max(usual, ...changes.map(([, step]) => step || 0));
  const rows = changes.map(([name, step]) => [name, step === null ? (unsure.includes(name) ? "no plan was found" : "nothing fits") : (least[name] ? seconds(least[name]) + " to " : "") + seconds(step),
    step === null ? "" : el("span", { class: "with-bar long" }, step === usual ? "the same" : `${percent(Math.abs(step / usual - 1))} ${step > usual ? "slower" : "faster"}`,
      bar([[step / most, step > usual ? "slower" : "faster"]], name))]);
  return panel("What if", table([["change"], ["time per batch", "number"], ["by the formulas, against " + seconds(usual)]], rows, { caption: "What would change the plan" }));
}

function reasons(place) {
  const lines = place.notes.filter(([origin]) => !["fuse", "lifetimes"].includes(origin)), planner = place.planner;
  if (planner) {
    const schedule = planner.formulas_of || place.schedule;
    if (planner.passed_over) lines.unshift(["planner", `by its formulas another plan of ${schedule} takes ${seconds(best(place))}, ${planner.passed_over}`]);
    if (planner.formulas_of) lines.unshift(["planner", `${place.schedule} with several stages on a device was faster than ${schedule}, by simulation`]);
    if (planner.left_out.length) lines.unshift(["left out", planner.left_out.join(", ")]);
  }
  return lines.length ? panel("Reasons", told(lines)) : null;
}

const told = (lines) => el("ul", { class: "reasons" }, lines.map(([origin, words]) => el("li", {}, el("span", { class: "origin" }, origin), el("span", {}, words))));

const signed = (share) => `${share < 0 ? "−" : "+"}${percent(Math.abs(share))}`;
