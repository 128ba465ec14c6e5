// What a rank's memory holds over time, by purpose, and at one moment by tensor; below it what the rank has in other spaces. The same time axis as the
// schedule's.

const FIXED = ["weights", "gradients", "state", "buffers", "data"];
const MOVING = ["items", "activations", "boundary", "free"];
const AT_HOME = ["alone", "also"];
const PURPOSE = {
  weights: "weights, all versions", gradients: "gradients", state: "optimiser state", buffers: "buffers", data: "data that wait",
  items: "weights, gradients and state that come and go", activations: "activations kept for the backward", boundary: "values between stages", free: "temporaries and free blocks",
  alone: "in another space alone", also: "there, and on the device as well",
};

function memoryView() {
  const memory = facts.memory;
  if (!memory) return { node: el("div", {}, view.title("Memory"), absent("Memory is known once there is a schedule.")) };
  let rank = 0, cursor = 0, everything = true;
  const held = facts.schedule.measured ? facts.schedule.measured.held : [], [run, plan] = facts.schedule.measured ? facts.schedule.measured.at : [0, 0];
  // The picture of the device, and that of another space, which has its name above it.
  const HEIGHT = 300, TOP = 24, LOW = 120, NAME = 18;
  const now = () => memory[rank];
  const fixedOf = (each) => FIXED.reduce((sum, name) => sum + each.fixed[name], 0);
  function unflat(flat, names) {
    const list = [];
    for (let i = 0; i < flat.length; i += names.length + 1) list.push({ time: flat[i], ...Object.fromEntries(names.map((name, j) => [name, flat[i + 1 + j]])) });
    return list.length ? list : [{ time: 0, ...Object.fromEntries(names.map((name) => [name, 0])) }];
  }
  const points = memory.map((each) => unflat(each.points, ["activations", "boundary", "free", "items"]));
  const homes = memory.map((each) => each.homes.map((home) => unflat(home.points, AT_HOME)));
  const finish = Math.max(1, ...points.map((list) => list[list.length - 1].time)) * 1.02;
  const chart = timeline({
    label: "Memory over time. Left and right move through time, plus and minus zoom, 0 shows all.", from: 0, to: finish, height: () => HEIGHT + now().homes.length * LOW, draw,
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
  function byteStep(span, room) {
    const unit = 1024 ** Math.max(0, Math.min(3, Math.floor(Math.log2(span) / 10)));
    return axisStep(span / unit, room) * unit;
  }

  function draw(axis) {
    const each = now(), list = points[rank], capacity = facts.placement.ranks[each.rank].capacity;
    const peak = Math.max(1, peakOf(list, each)), top = capacity && everything && capacity < 1.5 * peak ? Math.max(capacity, peak) * 1.04 : peak * 1.08;
    const y = (size) => HEIGHT - 6 - (size / top) * (HEIGHT - 6 - TOP);
    const nodes = marks(axis, y, top);
    let base = 0;
    for (const name of everything ? FIXED : []) {
      const size = each.fixed[name];
      if (size) nodes.push(svg("rect", { class: `fill-${name}`, x: axis.start, width: axis.end - axis.start, y: y(base + size), height: Math.max(0.5, y(base) - y(base + size)) }));
      base += size;
    }
    nodes.push(...areas(axis, y, list, MOVING, base));
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
    each.homes.forEach((home, i) => nodes.push(...drawHome(axis, home, homes[rank][i], HEIGHT + i * LOW)));
    const x = axis.x(list[cursor].time);
    fill(line, { x1: x, x2: x, y1: TOP - 4, y2: HEIGHT + each.homes.length * LOW - 6 }, []);
    line.setAttribute("visibility", x >= axis.start && x <= axis.end ? "visible" : "hidden");
    nodes.push(line);
    return nodes;
  }

  // Lines at whole steps of bytes.
  function marks(axis, y, top, room = 5) {
    const nodes = [], stride = byteStep(top, room);
    for (let i = 1; i * stride <= top; i++) {
      nodes.push(svg("line", { class: "grid", x1: axis.start, x2: axis.end, y1: y(i * stride), y2: y(i * stride) }), svg("text", { class: "axis end", x: axis.start - 6, y: y(i * stride) + 4 }, bytes(i * stride)));
    }
    return nodes;
  }

  // Parts of a curve, one above the other.
  function areas(axis, y, list, names, base) {
    const nodes = [], inside = list.filter((point, i) => point.time <= axis.high && (list[i + 1]?.time ?? finish) >= axis.low);
    const sums = inside.map(() => base);
    for (const name of names) {
      const lower = sums.map((sum) => y(sum));
      inside.forEach((point, i) => (sums[i] += point[name]));
      const upper = sums.map((sum) => y(sum)), begin = inside.map((point) => Math.max(axis.start, axis.x(point.time))), end = [...begin.slice(1), axis.end];
      const path = inside.map((_, i) => `L${begin[i].toFixed(1)},${upper[i].toFixed(1)}L${end[i].toFixed(1)},${upper[i].toFixed(1)}`).join("") +
        inside.map((_, i) => inside.length - 1 - i).map((i) => `L${end[i].toFixed(1)},${lower[i].toFixed(1)}L${begin[i].toFixed(1)},${lower[i].toFixed(1)}`).join("");
      if (path) nodes.push(svg("path", { class: `fill-${name}`, d: `M${path.slice(1)}Z` }));
    }
    return nodes;
  }

  // What the rank has in another space, under the device, from `above` on.
  function drawHome(axis, home, list, above) {
    const most = Math.max(1, ...list.map((point) => point.alone + point.also)), room = home.room && home.room < 1.5 * most ? home.room : 0;
    const low = above + LOW - 6, tall = LOW - NAME - 10, top = Math.max(room, most) * 1.08, y = (size) => low - (size / top) * tall;
    const nodes = [svg("text", { class: "axis home", x: axis.start, y: above + NAME - 5 }, `in ${home.space}`), ...marks(axis, y, top, 4), ...areas(axis, y, list, AT_HOME, 0)];
    if (room) nodes.push(svg("line", { class: "limit", x1: axis.start, x2: axis.end, y1: y(room), y2: y(room) }), svg("text", { class: "axis", x: axis.start + 4, y: y(room) - 4 }, `${bytes(room)} of ${home.space}, for all ranks`));
    return nodes;
  }

  // Of points in order of time the last one until then.
  function at(time, list = points[rank]) {
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

  // Where the blocks of items are at a time: on the device, or in the space alone.
  function staysAt(home, time) {
    const found = [];
    for (let i = 0; i < home.stays.length; i += 6) {
      const [item, owner, size, here, from, to] = home.stays.slice(i, i + 6);
      if (from <= time && (to < 0 || to > time)) found.push({ name: text(item), owner: text(owner), purpose: here ? "items" : "alone", size, place: here ? "" : home.space });
    }
    return found;
  }

  // What a copy is called, as a way to it in the schedule where that has it.
  function copyLink(action) {
    const found = action && findCopy(now().rank, action);
    return found ? button(action, () => openCopy(found), { class: "link" }) : action ? el("code", {}, action) : "no copy";
  }

  // What lies in another space at a time, and why items go there.
  function away(home, list, time) {
    const point = list[at(time, list)];
    const rows = home.absences.map(([item, size, gone, until, copy, out, back]) => [text(item), { value: size, node: bytes(size) }, { value: gone, node: seconds(gone * TICK) }, el("code", {}, until),
      { value: copy, node: copy ? seconds(copy * TICK) : "nothing" }, { value: out, node: copyLink(out) }, { value: back, node: copyLink(back) }]);
    return panel(`${bytes(point.alone + point.also)} at home in ${home.space}, ${bytes(point.alone)} of it there alone`,
      rows.length ? table([["goes"], ["bytes", "number"], ["away for", "number"], ["next use"], ["a copy takes", "number"], ["out"], ["back"]], rows, { caption: "An item goes where it is away for longer than its copies take" }) : null);
  }

  function tell() {
    const each = now(), point = points[rank][cursor], total = fixedOf(each) + moving(point);
    const parts = [...FIXED.map((name) => [name, each.fixed[name]]), ...MOVING.map((name) => [name, point[name]])].filter(([, size]) => size);
    const tensors = [...each.variables.map(([name, role, versions, size]) => ({ name: text(name), owner: versions > 1 ? plural(versions, "version") : "", purpose: { param: "weights", grad: "gradients", state: "state" }[role] || "buffers", size })),
      ...livesAt(point.time), ...each.homes.flatMap((home) => staysAt(home, point.time))].sort((a, b) => b.size - a.size);
    const elsewhere = tensors.filter((each) => each.place).length;
    const most = tensors.length ? tensors[0].size : 1;
    put(detail,
      panel(`At ${seconds(point.time * TICK)}: ${bytes(total)}`, table([["purpose"], ["bytes", "number"], ["share", "number"]],
        parts.map(([name, size]) => [el("span", { class: "key" }, el("i", { class: `swatch fill-${name}` }), PURPOSE[name]), { value: size, node: bytes(size) }, percent(size / total)]), { caption: "By purpose" })),
      panel(`${plural(tensors.length - elsewhere, "tensor")}${elsewhere ? ` and ${elsewhere} elsewhere` : ""}, the largest first`, several(tensors, (each) => el("div", { class: each.place ? "tensor elsewhere" : "tensor" }, el("i", { class: `swatch fill-${each.purpose}` }),
        el("code", {}, each.name), el("small", {}, [each.owner, each.place && `in ${each.place}`].filter(Boolean).join(", ")), bar([[each.size / most, `fill-${each.purpose}`]], bytes(each.size)), el("span", { class: "number" }, bytes(each.size))), 14)),
      each.homes.map((home, i) => el("div", { class: "wide" }, away(home, homes[rank][i], point.time))));
    const there = each.homes.map((home, i) => {
      const held = homes[rank][i][at(point.time, homes[rank][i])];
      return `; in ${home.space} ${bytes(held.alone + held.also)}`;
    });
    if (document.activeElement === chart.picture) say(`${seconds(point.time * TICK)}: ${bytes(total)}, ${parts.map(([name, size]) => `${PURPOSE[name]} ${bytes(size)}`).join(", ")}${there.join("")}`);
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
  const legend = el("div", { class: "legend" }, [...FIXED, ...MOVING, ...(memory.some((each) => each.homes.length) ? AT_HOME : [])].map((name) => el("span", { class: "key" }, el("i", { class: `swatch fill-${name}` }), PURPOSE[name])),
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
