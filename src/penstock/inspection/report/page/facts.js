// The facts, an index of them, and numbers as people read them.

const facts = JSON.parse(byId("facts").textContent);

const text = (number) => facts.strings[number];

// ------------------------------------------------------------------------------------------ numbers

function bytes(count) {
  let size = count;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024 || unit === "GiB") return unit === "B" ? `${Math.round(size)} B` : `${size.toFixed(size < 10 ? 2 : 1)} ${unit}`;
    size /= 1024;
  }
  return "";
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value), [factor, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${(value * factor).toPrecision(3).replace(/e\+?(\d+)/, (_, power) => "0".repeat(power))} ${unit}`;
}

function count(value) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) if (value >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  return Math.round(value).toLocaleString("en");
}

// With a unit, thousands as well.
function amount(value, unit) {
  for (const [size, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (value >= 0.9995 * size) return `${(value / size).toPrecision(3)} ${prefix}${unit}`;
  return `${Number(value.toPrecision(3))} ${unit}`;
}

const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;

function plural(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : /(s|x|ch|sh)$/.test(noun) ? "es" : "s"}`;
}

// ------------------------------------------------------------------------------------------ operations

// One object per operation of every graph, in order.
const operations = [];
for (const graph of facts.graph.graphs) {
  graph.first = operations.length;
  for (const [kind, outs, ins, loc, rest, kernel, variable, stage] of graph.ops) {
    operations.push({
      id: operations.length, graph, kind: text(kind), outs, ins, loc: text(loc), rest: text(rest), kernel: text(kernel), variable: text(variable), stage,
    });
  }
}

const values = facts.graph.values;
const valueName = (number) => text(values[number][0]);
const valueType = (number) => text(values[number][1]);

// What an operation is called: its first result, or the variable that it changes.
const titleOf = (op) => (op.outs.length ? valueName(op.outs[0]) : op.variable || op.kind);

// Kinds of graphs in the order of the first; and who makes a value, by kind: stages of one kind are one graph, cut.
const phases = new Map();
for (const graph of facts.graph.graphs) {
  if (!phases.has(graph.kind)) phases.set(graph.kind, { kind: graph.kind, graphs: [], operations: [], makers: new Map(), takers: new Map() });
  const phase = phases.get(graph.kind);
  phase.graphs.push(graph);
  for (const op of operations.slice(graph.first, graph.first + graph.ops.length)) {
    phase.operations.push(op);
    for (const value of op.outs) phase.makers.set(value, op);
    for (const value of op.ins) {
      if (!phase.takers.has(value)) phase.takers.set(value, []);
      phase.takers.get(value).push(op);
    }
  }
}

const PHASE_NAMES = { F: "Forward", R: "Forward again", B: "Backward", W: "Weight gradients", P: "Shared gradients", N: "Norm", U: "Update", main: "Model" };
const phaseName = (kind) => PHASE_NAMES[kind] || kind;

const ACTION_NAMES = {
  F: "forward", R: "forward again", B: "backward", W: "weight gradients", U: "update", P: "shared gradients", N: "norm", AR: "sum over replicas", CI: "copy in", CO: "copy out",
  SF: "send forward", RF: "receive forward", SB: "send backward", RB: "receive backward", SP: "send shared gradients", RP: "receive shared gradients",
  SN: "send norm", RN: "receive norm",
};

// The passes that say something of a name, by its number.
const touched = new Map();
(facts.passes || []).forEach((pass, index) => {
  for (const part of pass.parts) {
    for (const [mark, names] of part.rows) {
      for (const name of names) {
        if (!touched.has(name)) touched.set(name, []);
        const list = touched.get(name);
        if (!list.length || list[list.length - 1].index !== index) list.push({ index, mark });
      }
    }
  }
});

// ------------------------------------------------------------------------------------------ stages

// Colours repeat after eight stages.
const stageClass = (stage) => (stage < 0 ? "stage-none" : `stage-${stage % 8}`);

function stageChip(stage) {
  if (stage < 0) return null;
  const devices = (facts.summary.stages[stage] || [0, []])[1];
  return el("span", { class: `chip ${stageClass(stage)}` }, `stage ${stage}`, devices.length ? el("span", {}, devices.join(", ")) : null);
}
