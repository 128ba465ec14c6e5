// Kernels: what they do, what they should cost by the roofline of their device and did cost, and their source.

// The sources lie in the page deflated; they are unpacked when one is asked for.
let unpacked = null;
function sourcesOf(kernels) {
  unpacked ||= (async () => {
    const packed = Uint8Array.from(atob(kernels.sources), (letter) => letter.charCodeAt(0));
    return JSON.parse(await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).text());
  })();
  return unpacked;
}

function kernelsView() {
  const kernels = facts.kernels;
  if (!kernels || !kernels.rows.length) return { node: el("div", {}, view.title("Kernels"), absent("No kernels are chosen yet: they are, once the pass fuse has run.")) };
  let stage = -1, word = "", chosen = null;
  const timed = kernels.rows.some((row) => row.measured !== null);
  const label = (row) => `${row.graph}/${row.names[0]}`;
  const kindsOf = (row) => {
    const runs = [];
    for (const [kind] of row.ops) {
      if (runs.length && runs[runs.length - 1][0] === kind) runs[runs.length - 1][1]++;
      else runs.push([kind, 1]);
    }
    return runs.map(([kind, times]) => (times > 1 ? `${times}×${text(kind)}` : text(kind))).join(" ");
  };
  const list = el("div"), detail = el("div", { class: "kernel-detail" }), roof = el("div");
  const filter = el("input", { type: "search", id: "kernel-filter", placeholder: "operation, name, shape", "aria-label": "Only kernels with", oninput: () => {
    word = filter.value.toLowerCase();
    draw();
  } });
  const says = (row) => !word || [label(row), ...row.names, kindsOf(row), ...row.ops.flatMap(([, ins, outs]) => [text(ins), text(outs)])].join(" ").toLowerCase().includes(word);

  function draw() {
    const rows = kernels.rows.filter((row) => (stage < 0 || row.stage === stage) && says(row)).sort((a, b) => b.share - a.share);
    const columns = [["kernel"], ["operations", "code"], ["calls", "number"], ["work", "number"], ["bytes", "number"], ["roofline", "number"], ...(timed ? [["measured", "number"], ["of roofline", "number"]] : []), ["share of stage"]];
    const cells = rows.slice(0, 400).map((row) => [
      { value: label(row), node: el("button", { type: "button", class: `link ${row === chosen ? "chosen" : ""}`, onclick: () => show(row) }, label(row), row.names.length > 1 ? el("small", {}, ` and ${row.names.length - 1} alike`) : null) },
      { value: kindsOf(row), node: kindsOf(row) }, row.calls, { value: row.flops, node: row.flops ? amount(row.flops, "FLOP") : "–" }, { value: row.bytes, node: bytes(row.bytes) },
      { value: row.roofline, node: seconds(row.roofline) },
      ...(timed ? [{ value: row.measured ?? -1, node: seconds(row.measured) }, { value: row.measured ? row.roofline / row.measured : -1, node: row.measured ? percent(row.roofline / row.measured) : "–" }] : []),
      { value: row.share, node: el("span", { class: "with-bar short" }, percent(row.share), bar([[row.share, stageClass(row.stage)]], percent(row.share))) },
    ]);
    put(list, rows.length ? table(columns, cells, { caption: "Kernels", sortable: true }) : absent("No kernel says that."), rows.length > 400 ? el("p", { class: "hint" }, `The first 400 of ${rows.length.toLocaleString("en")}; search for others.`) : "");
    put(roof, roofline(rows, show));
  }

  function show(row, follow = true) {
    chosen = row;
    const source = el("div", { class: "source" }, absent("unpacking …"));
    if (row.source >= 0) sourcesOf(kernels).then((sources) => put(source, program(sources[row.source])), (error) => put(source, absent(`cannot be unpacked here: ${error}`)));
    put(detail, el("section", { class: "panel", tabindex: -1 },
      el("h3", {}, row.names.map((name) => `${row.graph}/${name}`).slice(0, 3).join(", "), row.names.length > 3 ? ` and ${row.names.length - 3} alike` : ""),
      el("dl", { class: "facts" }, el("dt", {}, "stage"), el("dd", {}, stageChip(row.stage)), el("dt", {}, "runs"), el("dd", {}, `${plural(row.names.length, "time")} per ${row.per}, ${plural(row.calls, "time")} per batch`),
        el("dt", {}, "bound by"), el("dd", {}, row.flops / row.rates[0] > row.bytes / row.rates[1] ? "computing" : "memory"), el("dt", {}, "roofline"), el("dd", {}, seconds(row.roofline)),
        row.measured ? [el("dt", {}, "measured"), el("dd", {}, seconds(row.measured))] : null),
      table([["operation"], ["operands", "code"], ["results", "code"]], row.ops.map((op) => op.map(text)), { caption: "Operations" }),
      row.source >= 0 ? el("details", { open: true }, el("summary", {}, "Source"), source) : absent("The source is not in this report: a dump folder has it, and penstock inspect --source prints it.")));
    if (follow) detail.firstChild.scrollIntoView({ block: "nearest" });
    draw();
  }

  const programs = kernels.programs.map(([name, number]) => {
    const body = el("div", {}, absent("unpacking …"));
    const shown = () => sourcesOf(kernels).then((sources) => put(body, program(sources[number])), (error) => put(body, absent(`cannot be unpacked here: ${error}`)));
    return el("details", { ontoggle: (event) => event.target.open && shown() }, el("summary", {}, name), body);
  });
  const stages = [...new Set(kernels.rows.map((row) => row.stage))];
  draw();
  return {
    node: el("div", {}, view.title("Kernels", `${plural(kernels.rows.length, "different kernel")}, ${plural(kernels.rows.reduce((sum, row) => sum + row.names.length, 0), "call")} of them in the graphs.`),
      el("div", { class: "toolbar" }, el("div", { class: "tools" }, stages.length > 1 ? choice("Stage", [[-1, "All stages"], ...stages.map((each) => [each, `stage ${each}`])], -1, (value) => {
        stage = value;
        draw();
      }) : null, filter)), panel("Roofline", roof), detail, panel("", list), programs.length ? panel("Programs of stages", programs) : null),
    find(op) {
      const row = kernels.rows.find((each) => each.graph === op.graph.name && each.names.includes(op.kernel));
      if (row) show(row);
      return Boolean(row);
    },
  };
}

// Measured rate over work per byte, both on logarithmic scales, under the roof of each device; a dot is a kernel, its size its share.
function roofline(rows, choose) {
  const dots = rows.filter((row) => row.flops && row.bytes && row.measured).map((row) => ({ row, x: row.flops / row.bytes, y: row.flops / row.measured }));
  if (!dots.length) return absent("Dots are measured kernels under what their device could do; none of these was timed here. penstock inspect --kernels --measure times them.");
  const WIDTH = 1180, HEIGHT = 250, LEFT = 92, BOTTOM = 38, TOP = 10;
  const roofs = [...new Map(rows.map((row) => [row.rates.join(), row])).values()];
  const low = Math.min(...dots.map((dot) => dot.x)) / 2, high = Math.max(...dots.map((dot) => dot.x), ...roofs.map((row) => (4 * row.rates[0]) / row.rates[1]));
  const least = Math.min(...dots.map((dot) => dot.y)) / 2, most = Math.max(...roofs.map((row) => row.rates[0]), ...dots.map((dot) => dot.y)) * 1.6;
  const x = (value) => LEFT + (Math.log(value / low) / Math.log(high / low)) * (WIDTH - LEFT - 10);
  const y = (value) => HEIGHT - BOTTOM - (Math.log(value / least) / Math.log(most / least)) * (HEIGHT - BOTTOM - TOP);
  const nodes = [];
  for (let power = Math.ceil(Math.log10(least)); 10 ** power < most; power++) nodes.push(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - 10, y1: y(10 ** power), y2: y(10 ** power) }), svg("text", { class: "axis end", x: LEFT - 6, y: y(10 ** power) + 4 }, amount(10 ** power, "FLOP/s").replace(/\.0+ /, " ")));
  for (let power = Math.ceil(Math.log10(low)); 10 ** power < high; power++) nodes.push(svg("line", { class: "grid", x1: x(10 ** power), x2: x(10 ** power), y1: TOP, y2: HEIGHT - BOTTOM }), svg("text", { class: "axis middle", x: x(10 ** power), y: HEIGHT - 21 }, String(Number((10 ** power).toPrecision(1)))));
  nodes.push(svg("text", { class: "axis middle", x: (LEFT + WIDTH) / 2, y: HEIGHT - 4 }, "FLOP per byte"));
  for (const { rates: [rate, bandwidth] } of roofs) {
    const knee = Math.max(low, Math.min(high, rate / bandwidth)), start = Math.max(low, least / bandwidth);
    nodes.push(svg("path", { class: "roof", d: `M${x(start)},${y(start * bandwidth)}L${x(knee)},${y(Math.min(rate, knee * bandwidth))}L${x(high)},${y(Math.min(rate, high * bandwidth))}` }));
  }
  for (const { row, x: along, y: up } of dots) {
    const dot = svg("circle", { class: `spot ${stageClass(row.stage)}`, cx: x(along), cy: y(up), r: 3 + 12 * Math.sqrt(row.share) });
    dot.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, `${row.graph}/${row.names[0]}`, [["operations", row.ops.slice(0, 4).map(([kind]) => text(kind)).join(" ")], ["rate", amount(up, "FLOP/s")], ["work per byte", along.toPrecision(3)], ["share", percent(row.share)]]));
    dot.addEventListener("pointerleave", hideTip);
    dot.addEventListener("click", () => choose(row));
    nodes.push(dot);
  }
  const computing = rows.filter((row) => row.flops && row.bytes).length;
  return el("div", { class: "scroll" }, dots.length < computing ? el("p", { class: "hint" }, `${dots.length} of ${plural(computing, "kernel")} that compute were timed here.`) : null, svg("svg", { class: "roofline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Roofline of ${plural(dots.length, "kernel")}; the table has the numbers` }, nodes));
}
