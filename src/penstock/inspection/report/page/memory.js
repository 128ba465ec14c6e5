// What a rank's memory holds over time, by purpose, and at one moment by tensor. The same time axis as the schedule's.

const FIXED = ["weights", "gradients", "state", "buffers", "data"];
const MOVING = ["items", "activations", "boundary", "free"];
const PURPOSE = {
  weights: "weights, all versions", gradients: "gradients", state: "optimiser state", buffers: "buffers", data: "data that wait",
  items: "weights, gradients and state that come and go", activations: "activations kept for the backward", boundary: "values between stages", free: "temporaries and free blocks",
};

function memoryView() {
  const memory = facts.memory;
  if (!memory) return { node: el("div", {}, view.title("Memory"), absent("Memory is known once there is a schedule.")) };
  let rank = 0, cursor = 0, everything = true;
  const held = facts.schedule.measured ? facts.schedule.measured.held : [], [run, plan] = facts.schedule.measured ? facts.schedule.measured.at : [0, 0];
  const HEIGHT = 300, TOP = 24;
  const now = () => memory[rank];
  const fixedOf = (each) => FIXED.reduce((sum, name) => sum + each.fixed[name], 0);
  const points = memory.map((each) => {
    const list = [];
    for (let i = 0; i < each.points.length; i += 5) list.push({ time: each.points[i], activations: each.points[i + 1], boundary: each.points[i + 2], free: each.points[i + 3], items: each.points[i + 4] });
    return list.length ? list : [{ time: 0, activations: 0, boundary: 0, free: 0, items: 0 }];
  });
  const finish = Math.max(1, ...points.map((list) => list[list.length - 1].time)) * 1.02;
  const chart = timeline({
    label: "Memory over time. Left and right move through time, plus and minus zoom, 0 shows all.", from: 0, to: finish, height: () => HEIGHT, draw,
    keys: { ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => set(0), End: () => set(points[rank].length - 1) }, left: 74,
  });
  chart.picture.classList.add("area");
  const line = svg("line", { class: "cursor" });
  const detail = el("div", { class: "moment" });

  const moving = (point) => MOVING.reduce((sum, name) => sum + point[name], 0);

  function peakOf(list, each) {
    const most = list.reduce((peak, point) => Math.max(peak, moving(point)), 0);
    return (everything ? fixedOf(each) : 0) + most;
  }

  // Steps of whole KiB, MiB or GiB.
  function byteStep(span) {
    const unit = 1024 ** Math.max(0, Math.min(3, Math.floor(Math.log2(span) / 10)));
    return axisStep(span / unit, 5) * unit;
  }

  function draw(axis) {
    const each = now(), list = points[rank], capacity = facts.placement.ranks[each.rank].capacity;
    const peak = Math.max(1, peakOf(list, each)), top = capacity && everything && capacity < 1.5 * peak ? Math.max(capacity, peak) * 1.04 : peak * 1.08;
    const y = (size) => HEIGHT - 6 - (size / top) * (HEIGHT - 6 - TOP);
    const nodes = [];
    for (let i = 1, stride = byteStep(top); i * stride <= top; i++) {
      nodes.push(svg("line", { class: "grid", x1: axis.start, x2: axis.end, y1: y(i * stride), y2: y(i * stride) }), svg("text", { class: "axis end", x: axis.start - 6, y: y(i * stride) + 4 }, bytes(i * stride)));
    }
    let base = 0;
    for (const name of everything ? FIXED : []) {
      const size = each.fixed[name];
      if (size) nodes.push(svg("rect", { class: `fill-${name}`, x: axis.start, width: axis.end - axis.start, y: y(base + size), height: Math.max(0.5, y(base) - y(base + size)) }));
      base += size;
    }
    const inside = list.filter((point, i) => point.time <= axis.high && (list[i + 1]?.time ?? finish) >= axis.low);
    const sums = inside.map(() => base);
    for (const name of MOVING) {
      const lower = sums.map((sum) => y(sum));
      inside.forEach((point, i) => (sums[i] += point[name]));
      const upper = sums.map((sum) => y(sum)), begin = inside.map((point) => Math.max(axis.start, axis.x(point.time))), end = [...begin.slice(1), axis.end];
      const path = inside.map((_, i) => `L${begin[i].toFixed(1)},${upper[i].toFixed(1)}L${end[i].toFixed(1)},${upper[i].toFixed(1)}`).join("") +
        inside.map((_, i) => inside.length - 1 - i).map((i) => `L${end[i].toFixed(1)},${lower[i].toFixed(1)}L${begin[i].toFixed(1)},${lower[i].toFixed(1)}`).join("");
      if (path) nodes.push(svg("path", { class: `fill-${name}`, d: `M${path.slice(1)}Z` }));
    }
    const measured = held[rank] || [];
    if (measured.length) {
      let path = "";
      for (let i = 0; i < measured.length; i += 2) {
        const x = Math.max(axis.start, Math.min(axis.end, axis.x(measured[i]))), next = i + 2 < measured.length ? axis.x(measured[i + 2]) : x;
        path += `${path ? "L" : "M"}${x.toFixed(1)},${y(base + measured[i + 1]).toFixed(1)}H${Math.max(axis.start, Math.min(axis.end, next)).toFixed(1)}`;
      }
      nodes.push(svg("path", { class: "measured-line", d: path }));
    }
    if (capacity && everything && capacity < 1.5 * peak) {
      nodes.push(svg("line", { class: "limit", x1: axis.start, x2: axis.end, y1: y(capacity), y2: y(capacity) }), svg("text", { class: "axis", x: axis.start + 4, y: y(capacity) - 4 }, `${bytes(capacity)} on ${facts.placement.ranks[each.rank].device}`));
    }
    const x = axis.x(list[cursor].time);
    fill(line, { x1: x, x2: x, y1: TOP - 4, y2: HEIGHT - 6 }, []);
    line.setAttribute("visibility", x >= axis.start && x <= axis.end ? "visible" : "hidden");
    nodes.push(line);
    return nodes;
  }

  function at(time) {
    const list = points[rank];
    let low = 0, high = list.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (list[middle].time <= time) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  chart.picture.addEventListener("pointermove", (event) => {
    const box = chart.picture.getBoundingClientRect(), next = at(chart.axis().time(event.clientX - box.x));
    if (next !== cursor) set(next, false);
  });

  function step(by) {
    set(Math.max(0, Math.min(points[rank].length - 1, cursor + by)));
  }

  function set(next, keep = true) {
    cursor = next;
    const point = points[rank][cursor];
    if (keep) chart.keep(point.time, point.time);
    const axis = chart.axis(), x = axis.x(point.time);
    for (const end of ["x1", "x2"]) line.setAttribute(end, x);
    line.setAttribute("visibility", x >= axis.start && x <= axis.end ? "visible" : "hidden");
    tell();
  }

  function livesAt(time) {
    const { lives } = now(), found = [];
    for (let i = 0; i < lives.length; i += 6) {
      const [name, owner, purpose, size, from, to] = lives.slice(i, i + 6);
      if (from <= time && (to < 0 || to > time)) found.push({ name: text(name), owner: owner >= 0 ? `microbatch ${owner}` : `batch ${-1 - owner}`, purpose: ["activations", "boundary"][purpose], size, from, to });
    }
    return found;
  }

  // What lies in another space at a time, and why items go there.
  function away(home, time) {
    let there = home.course[1] || 0;
    for (let i = 0; i < home.course.length && home.course[i] <= time; i += 2) there = home.course[i + 1];
    const rows = home.absences.map(([item, size, gone, until, copy]) => [item, { value: size, node: bytes(size) }, { value: gone, node: seconds(gone * TICK) }, el("code", {}, until), { value: copy, node: copy ? seconds(copy * TICK) : "nothing" }]);
    return panel(`${bytes(there)} at home in ${home.space}`, rows.length ? table([["goes"], ["bytes", "number"], ["away for", "number"], ["until"], ["a copy takes", "number"]], rows, { caption: "An item goes where it is away for longer than its copies take" }) : null);
  }

  function tell() {
    const each = now(), point = points[rank][cursor], total = fixedOf(each) + moving(point);
    const parts = [...FIXED.map((name) => [name, each.fixed[name]]), ...MOVING.map((name) => [name, point[name]])].filter(([, size]) => size);
    const tensors = [...each.variables.map(([name, role, versions, size]) => ({ name: text(name), owner: versions > 1 ? plural(versions, "version") : "", purpose: { param: "weights", grad: "gradients", state: "state" }[role] || "buffers", size })),
      ...livesAt(point.time)].sort((a, b) => b.size - a.size);
    const most = tensors.length ? tensors[0].size : 1;
    put(detail,
      panel(`At ${seconds(point.time * TICK)}: ${bytes(total)}`, table([["purpose"], ["bytes", "number"], ["share", "number"]],
        parts.map(([name, size]) => [el("span", { class: "key" }, el("i", { class: `swatch fill-${name}` }), PURPOSE[name]), { value: size, node: bytes(size) }, percent(size / total)]), { caption: "By purpose" })),
      panel(`${plural(tensors.length, "tensor")}, the largest first`, several(tensors, (each) => el("div", { class: "tensor" }, el("i", { class: `swatch fill-${each.purpose}` }),
        el("code", {}, each.name), el("small", {}, each.owner), bar([[each.size / most, `fill-${each.purpose}`]], bytes(each.size)), el("span", { class: "number" }, bytes(each.size))), 14)),
      each.home ? away(each.home, point.time) : null);
    if (document.activeElement === chart.picture) say(`${seconds(point.time * TICK)}: ${bytes(total)}, ${parts.map(([name, size]) => `${PURPOSE[name]} ${bytes(size)}`).join(", ")}`);
  }

  function peak() {
    let best = 0;
    points[rank].forEach((point, i) => {
      if (moving(point) > moving(points[rank][best])) best = i;
    });
    set(best);
  }

  const pick = el("label", { class: "inline" }, "Rank ", el("select", { id: "memory-rank", onchange: (event) => {
    rank = Number(event.target.value);
    cursor = 0;
    chart.redraw();
    peak();
  } }, memory.map((each, i) => el("option", { value: i }, `${rankLabel(each.rank)}, ${bytes(facts.placement.ranks[each.rank].peak)}`))));
  const legend = el("div", { class: "legend" }, [...FIXED, ...MOVING].map((name) => el("span", { class: "key" }, el("i", { class: `swatch fill-${name}` }), PURPOSE[name])),
    held.some((each) => each.length) ? el("span", { class: "key" }, el("i", { class: "swatch measured-key" }), "values held, measured") : null);
  return {
    node: el("div", {}, view.title("Memory", "Planned bytes of every device while batches run, and what they are at one moment."),
      el("div", { class: "toolbar" }, el("div", { class: "tools" }, pick, choice("What is shown", [["all", "Everything"], ["moving", "What changes"]], "all", (value) => {
        everything = value === "all";
        chart.redraw();
      }), button("Peak", peak), chart.tools), legend),
      el("div", { class: "panel chart" }, chart.picture),
      held.some((each) => each.length) ? el("p", { class: "hint" }, `Measured values are laid out by action, at the times of the plan: batch ${run} of the run where batch ${plan} of the plan is, and what is around it.`) : null, detail),
    shown: () => {
      chart.redraw();
      peak();
    },
  };
}
