// Who runs what when: the planned timeline of every rank, and under it the measured one where there is a trace, from the beginning of the same batch.

const COMPUTING = new Set(["F", "R", "B", "W", "P", "N", "U"]);
const ONCE = new Set(["U", "P", "N", "AR", "CI", "CO", "SP", "RP", "SN", "RN"]);

// The actions of every rank as objects, and where batches begin.
function unpack(found) {
  const kinds = facts.schedule.kinds, per = facts.schedule.microbatches;
  const lines = found.lines.map((flat, i) => {
    const line = [];
    for (let at = 0; at < flat.length; at += 6) {
      const [kind, number, version, peer, start, length] = flat.slice(at, at + 6);
      const once = ONCE.has(kinds[kind]);
      line.push({ kind: kinds[kind], number, version, peer, start, length, rank: found.ranks[i], once, batch: once ? number : Math.floor(number / per) });
    }
    return line;
  });
  const copies = (found.copies || []).map((flat, i) => {
    const line = [];
    for (let at = 0; at < flat.length; at += 6) {
      const [name, kind, number, once, start, length] = flat.slice(at, at + 6);
      line.push({ name, kind: kinds[kind], number, version: -1, peer: -1, start, length, rank: found.ranks[i], once: Boolean(once), batch: once ? number : Math.floor(number / per) });
    }
    return line;
  });
  const finish = Math.max(0, ...lines.map((line) => line.reduce((end, slice) => Math.max(end, slice.start + slice.length), 0)));
  return { lines, copies, finish, first: found.batches[0], count: found.batches[1], anchors: found.anchors, ranks: found.ranks };
}

const sliceName = (slice) => slice.name || `${slice.kind}${slice.number}${slice.version >= 0 ? `@${slice.version}` : ""}`;

// A copy that the picture of the plan has, by its rank and action.
function findCopy(rank, name) {
  const { copies, ranks } = facts.schedule.planned;
  return (copies[ranks.indexOf(rank)] || []).includes(name) ? { rank, name } : null;
}

const rankLabel = (rank) => {
  const place = facts.placement.ranks[rank];
  return place ? `rank ${rank} · ${place.device}` : `rank ${rank}`;
};

function scheduleView() {
  const schedule = facts.schedule;
  if (!schedule) return { node: el("div", {}, view.title("Schedule"), absent("This program has no schedule with messages yet.")) };
  const planned = unpack(schedule.planned), measured = schedule.measured ? unpack(schedule.measured) : null;
  // Where any rank copies, each has a lane for what comes and one for what goes.
  const LANES = planned.copies.some((line) => line.length) ? [["CI", "in"], ["CO", "out"]] : [];
  const TRACK = 24, LOW = 15, LANE = LOW + 3, REST = TRACK + LANES.length * LANE, ROW = REST + (measured ? LOW + 12 : 0) + 12, TOP = 26;
  let batch = measured ? schedule.measured.at[0] : 0, lit = null, focus = null;

  // How much longer a batch of the run takes than one of the plan; by so much the plan is stretched where the two could not be seen at one scale.
  const paceOf = ({ anchors }) => {
    const gaps = anchors.slice(1).map((anchor, i) => anchor - anchors[i]).sort((a, b) => a - b);
    return gaps.length ? gaps[gaps.length >> 1] : 0;
  };
  const ratio = measured && paceOf(planned) > 0 && paceOf(measured) > 0 ? paceOf(measured) / paceOf(planned) : 1;
  let stretched = 1;
  function stretch(by) {
    for (const slice of [...planned.lines, ...planned.copies].flat()) [slice.start, slice.length] = [(slice.start * by) / stretched, (slice.length * by) / stretched];
    planned.anchors = planned.anchors.map((anchor) => (anchor * by) / stretched);
    planned.finish *= by / stretched;
    stretched = by;
  }
  const far = ratio > 3 || ratio < 1 / 3;
  if (far) stretch(ratio);

  // A planned batch of the same state: of the beginning its own, later one from the middle of the plan.
  const twin = () => Math.min(batch, Math.floor(planned.count / 2));
  const shifts = () => ({ planned: measured ? -planned.anchors[twin()] : 0, measured: measured ? -measured.anchors[batch - measured.first] : 0 });
  const limits = () => {
    const { planned: a, measured: b } = shifts();
    return measured ? [Math.min(a, b), Math.max(planned.finish + a, measured.finish + b)] : [0, planned.finish];
  };
  const lanesOf = (i) => LANES.map(([kind]) => planned.copies[i].filter((slice) => slice.kind === kind));
  const tracks = planned.ranks.map((rank, i) => ({ rank, planned: planned.lines[i], lanes: lanesOf(i), measured: measured ? measured.lines[measured.ranks.indexOf(rank)] || [] : null }));

  const [from, to] = limits();
  const chart = timeline({
    label: "Schedule. Left and right go from action to action, up and down from rank to rank, plus and minus zoom, 0 shows all.",
    from, to, height: () => TOP + tracks.length * ROW, draw,
    keys: { ArrowRight: () => go(1), ArrowLeft: () => go(-1), ArrowDown: () => change(1), ArrowUp: () => change(-1) },
  });
  chart.picture.classList.add("gantt");

  function draw(axis) {
    const nodes = [], { planned: a, measured: b } = shifts();
    planned.anchors.forEach((anchor, i) => {
      const x = axis.x(anchor + a);
      if (x >= axis.start && x <= axis.end) nodes.push(svg("line", { class: "anchor", x1: x, x2: x, y1: 16, y2: TOP + tracks.length * ROW }, svg("title", {}, `batch ${planned.first + i} begins`)));
    });
    tracks.forEach((track, i) => {
      const y = TOP + i * ROW, place = facts.placement.ranks[track.rank];
      nodes.push(svg("circle", { class: `dot ${stageClass(place.stage)}`, cx: 7, cy: y + TRACK / 2, r: 4 }), svg("text", { class: "row", x: 16, y: y + TRACK / 2 + 4 }, axis.width < 560 ? `rank ${track.rank}` : clip(rankLabel(track.rank), 160)));
      nodes.push(svg("rect", { class: "track", x: axis.start, y, width: axis.end - axis.start, height: TRACK, rx: 3 }));
      slices(track.planned, axis, a, y, TRACK, nodes, "planned");
      const below = [...track.lanes.map((lane, j) => [`copies ${LANES[j][1]}`, lane, a, "planned"]), ...(track.measured ? [["measured", track.measured, b, "measured"]] : [])];
      below.forEach(([name, line, shift, source], j) => {
        const above = y + TRACK + 3 + j * LANE;
        if (axis.width >= 560) nodes.push(svg("text", { class: "row faint", x: 16, y: above + LOW - 4 }, name));
        nodes.push(svg("rect", { class: "track", x: axis.start, y: above, width: axis.end - axis.start, height: LOW, rx: 3 }));
        slices(line, axis, shift, above, LOW, nodes, source);
      });
    });
    chart?.picture.classList.toggle("dim", Boolean(lit));
    return nodes;
  }

  function slices(line, axis, shift, y, height, nodes, source) {
    let reached = -1;
    for (const slice of line) {
      const start = axis.x(slice.start + shift), end = axis.x(slice.start + slice.length + shift);
      if (end < axis.start || start > axis.end || !(slice.length || slice.name)) continue;
      const x = Math.max(start, axis.start), width = Math.min(end, axis.end) - x, computes = COMPUTING.has(slice.kind) || Boolean(slice.name);
      // What is narrower than a pixel is drawn once per pixel.
      if (width < 0.7 && Math.floor(x) === reached && slice !== focus) continue;
      reached = Math.floor(x);
      const box = svg("rect", { class: `slice kind-${computes ? slice.kind : "wait"} ${isLit(slice) ? "lit" : ""} ${slice === focus ? "focused" : ""}`,
        x: x.toFixed(2), y: computes ? y : y + height - 5, width: Math.max(0.7, width - (width > 4 ? 0.8 : 0)).toFixed(2), height: computes ? height : 4, rx: width > 6 ? 3 : 0 });
      box.slice = slice;
      box.addEventListener("pointermove", (event) => {
        light(slice);
        showTip(event.clientX, event.clientY, `${sliceName(slice)} · ${ACTION_NAMES[slice.kind]}`, tipOf(slice, shift, source));
      });
      nodes.push(box);
      if (computes && width > 26 && height > 18) nodes.push(svg("text", { class: "inside", x: x + 4, y: y + height / 2 + 4 }, width > 52 ? sliceName(slice) : `${slice.kind}${slice.number}`));
    }
  }

  const isLit = (slice) => Boolean(lit && lit.number === slice.number && lit.once === slice.once);

  // All that belongs to the same microbatch.
  function light(slice) {
    if (lit && isLit(slice)) return;
    lit = slice;
    chart.picture.classList.add("dim");
    for (const box of chart.picture.querySelectorAll(".slice")) box.classList.toggle("lit", isLit(box.slice));
  }

  function unlight() {
    lit = null;
    hideTip();
    chart.picture.classList.remove("dim");
  }
  chart.picture.addEventListener("pointerleave", unlight);

  const average = new Map((schedule.measured ? schedule.measured.compared : []).map(([rank, kind, plan, real]) => [`${rank} ${kind}`, [plan, real]]));
  function tipOf(slice, shift, source) {
    const pair = average.get(`${slice.rank} ${slice.kind}`), real = source === "planned" ? stretched : 1;
    return [
      ["rank", rankLabel(slice.rank)], [slice.once ? "batch" : "microbatch", `${slice.number}${slice.once ? "" : ` of batch ${slice.batch}`}`],
      ["weights", slice.version >= 0 ? `version ${slice.version}` : ""], ["peer", slice.peer >= 0 ? `rank ${slice.peer}` : ""],
      ["starts", seconds(((slice.start + shift) * TICK) / real)], [slice.name ? "is awaited after" : "takes", `${seconds((slice.length * TICK) / real)}, ${source}`],
      ["median", pair ? `planned ${seconds(pair[0])}, measured ${seconds(pair[1])}` : ""],
    ];
  }

  // ---------------------------------------------------------------- keys

  const stops = (line) => line.filter((slice) => COMPUTING.has(slice.kind) || slice.name);
  const lines = tracks.flatMap((track) => [track.planned, ...track.lanes, ...(track.measured ? [track.measured] : [])]).filter((line) => stops(line).length);
  const lineOf = (slice) => lines.find((line) => line.includes(slice));
  function go(by) {
    const line = stops(focus ? lineOf(focus) : tracks[0].planned), at = focus ? line.indexOf(focus) + by : 0;
    set(line[Math.max(0, Math.min(line.length - 1, at))]);
  }
  function change(by) {
    if (!focus) return go(0);
    const line = stops(lines[Math.max(0, Math.min(lines.length - 1, lines.indexOf(lineOf(focus)) + by))]);
    set(line.reduce((best, slice) => (Math.abs(slice.start - focus.start) < Math.abs(best.start - focus.start) ? slice : best), line[0]));
    return undefined;
  }
  function set(slice) {
    if (!slice) return;
    focus = slice;
    const source = tracks.some((track) => track.measured?.includes(slice)) ? "measured" : "planned", shift = shifts()[source];
    chart.keep(slice.start + shift, slice.start + slice.length + shift);
    lit = null;
    light(slice);
    chart.redraw();
    const box = [...chart.picture.querySelectorAll(".slice")].find((each) => each.slice === slice)?.getBoundingClientRect();
    const told = tipOf(slice, shift, source);
    if (box) showTip(box.x + Math.min(box.width, 40), box.bottom - 6, `${sliceName(slice)} · ${ACTION_NAMES[slice.kind]}`, told);
    say([sliceName(slice), ...told.filter(([, value]) => value).map((pair) => pair.join(" "))].join(", "));
  }
  chart.picture.addEventListener("blur", () => {
    focus = null;
    unlight();
  });
  chart.picture.addEventListener("keydown", (event) => event.key === "Escape" && unlight());

  // ---------------------------------------------------------------- around it

  const kinds = [...new Set(planned.lines.flat().map((slice) => slice.kind))].filter((kind) => COMPUTING.has(kind));
  const legend = el("div", { class: "legend" }, [...kinds, ...LANES.map(([kind]) => kind)].map((kind) => el("span", { class: "key" }, el("i", { class: `swatch kind-${kind}` }), `${kind} ${ACTION_NAMES[kind]}`)));
  const from_batch = measured ? el("label", { class: "inline" }, "Both begin with batch ", el("input", { type: "number", min: measured.first, max: measured.first + measured.count - 1, value: batch,
    onchange: (event) => {
      batch = Math.max(measured.first, Math.min(measured.first + measured.count - 1, Number(event.target.value) || 0));
      chart.bounds(...limits());
    } }), `; measured are ${measured.first} to ${measured.first + measured.count - 1} of ${schedule.measured.of}`) : null;
  const scale = far ? choice("Scale of the plan", [["batch", `Plan stretched ${ratio.toPrecision(3)} times`], ["same", "One scale"]], "batch", (value) => {
    stretch(value === "batch" ? ratio : 1);
    chart.bounds(...limits());
    first();
  }) : null;
  // A few batches at first: what all of them look like is one key away.
  function first() {
    const [low, high] = limits(), { planned: a, measured: b } = shifts();
    const from = (found, shift, index) => (found.anchors[index] === undefined ? found.finish : found.anchors[index]) + shift;
    // Three as planned, and one as measured if that takes longer.
    const end = measured ? Math.max(from(planned, a, twin() + 3), 1.1 * from(measured, b, batch - measured.first + 1)) : from(planned, a, 3);
    chart.look(measured ? Math.max(low, -end / 12) : low, Math.min(high, end));
  }
  const whole = [["busy", 0], ["waiting", 1], ["idle", 2]];
  const use = facts.placement.ranks.map((rank) => {
    const sum = rank.use[0] + rank.use[1] + rank.use[2] || 1;
    return [{ value: rank.rank, node: rankLabel(rank.rank) }, { value: rank.use[0], node: bar(whole.map(([name, i]) => [rank.use[i] / sum, name, name]), whole.map(([name, i]) => `${name} ${percent(rank.use[i] / sum)}`).join(", ")) },
      ...whole.map(([, i]) => percent(rank.use[i] / sum))];
  });
  const about = `${facts.summary.schedule}: ${plural(schedule.microbatches, "microbatch")} per batch. ` +
    (measured ? "Above what was planned, below it what was measured." : "Planned, as the simulator has it; a report with --trace lays a measured run under it.");
  return {
    node: el("div", {}, view.title("Schedule", about), el("div", { class: "toolbar" }, el("div", { class: "tools" }, chart.tools, scale, from_batch), legend),
      el("div", { class: "panel chart" }, chart.picture),
      el("p", { class: "hint" }, "Point at an action to follow its microbatch through the pipeline. Drag to move, ctrl and the wheel to zoom."),
      el("div", { class: "columns" },
        panel("How ranks spend a batch", table([["rank"], ["share"], ["busy", "number"], ["waiting", "number"], ["idle", "number"]], use, { caption: "How ranks spend a batch" })),
        measured ? panel("Planned and measured", table([["rank", "number"], ["computation"], ["planned", "number"], ["measured", "number"], ["ratio", "number"]],
          schedule.measured.compared.map(([rank, kind, plan, real]) => [rank, ACTION_NAMES[kind], { value: plan, node: seconds(plan) }, { value: real, node: seconds(real) }, plan ? (real / plan).toFixed(2) : "–"]),
          { caption: "Medians of computations", sortable: true })) : null)),
    shown: first,
    reveal: ({ rank, name }) => {
      chart.picture.focus();
      set(planned.copies[planned.ranks.indexOf(rank)].find((slice) => slice.name === name));
    },
  };
}
