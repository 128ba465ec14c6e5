// The model as a graph: operations in the blocks that their source gives them, closed at first, opened one by one, coloured by stage.

// Reads of variables and constants stand with what reads them.
const QUIET = new Set(["read", "const"]);
// Where a name says nothing of blocks, so many operations in a row are one.
const MOST_CHILDREN = 120, CHUNK = 60;
// So many nodes are shown at first, and at most.
const AT_FIRST = 40, AT_MOST = 2500;

// h.0.attn.qkv and /transformer/h.0/attn/qkv: a number belongs to the word before it.
function blocksOf(name) {
  const words = [];
  for (const word of name.split(/[/.]/).filter(Boolean)) {
    if (/^\d+$/.test(word) && words.length) words[words.length - 1] += `.${word}`;
    else words.push(word);
  }
  return words;
}

class Block {
  constructor(name, parent) {
    Object.assign(this, { name, parent, children: [], blocks: new Map(), open: false, depth: parent ? parent.depth + 1 : 0 });
  }

  // The block of a name in this one.
  within(name) {
    if (!this.blocks.has(name)) {
      const block = new Block(name, this);
      this.blocks.set(name, block);
      this.children.push(block);
    }
    return this.blocks.get(name);
  }
}

// The blocks of one kind of graphs.
function treeOf(phase) {
  const shown = phase.operations.filter((op) => !QUIET.has(op.kind));
  const paths = shown.map((op) => blocksOf(op.loc || op.variable || titleOf(op)));
  const names = new Set();
  for (const path of paths) for (let i = 1; i < path.length; i++) names.add(path.slice(0, i).join("/"));
  const root = new Block("", null);
  shown.forEach((op, i) => {
    const path = paths[i], whole = path.join("/");
    // What is called like a block stands in it; what one node of the source became stands together.
    const depth = names.has(whole) || paths[i - 1]?.join("/") === whole || paths[i + 1]?.join("/") === whole ? path.length : path.length - 1;
    let block = root;
    for (const name of path.slice(0, depth)) block = block.within(name);
    block.children.push({ op, name: path[path.length - 1] || op.kind, parent: null });
  });
  finish(root, false);
  return root;
}

// Blocks of one child are that child; long lists become chunks; every node knows its operations and stages.
function finish(block, kept) {
  block.children = block.children.map((child) => (child.op ? child : finish(child, true)));
  if (kept && block.children.length === 1) {
    const [child] = block.children;
    if (!child.op) child.name = `${block.name}.${child.name}`;
    return child;
  }
  if (block.children.length > MOST_CHILDREN) {
    const all = block.children;
    block.children = [];
    for (let i = 0; i < all.length; i += CHUNK) {
      const chunk = new Block(`${nameOf(all[i])} …`, block);
      chunk.children = all.slice(i, i + CHUNK);
      block.children.push(summed(chunk));
    }
  }
  return summed(block);
}

const nameOf = (node) => (node.op ? node.name || titleOf(node.op) : node.name);

function summed(block) {
  block.operations = [];
  for (const child of block.children) {
    child.parent = block;
    child.operations ||= [child.op];
    for (const op of child.operations) block.operations.push(op);
  }
  block.order = Math.min(...block.operations.map((op) => op.id));
  block.children.forEach((child) => (child.order ??= child.op.id));
  block.stages = new Map();
  for (const op of block.operations) block.stages.set(op.stage, (block.stages.get(op.stage) || 0) + 1);
  return block;
}

// Blocks are opened level by level, as long as few nodes are on the screen.
function openSome(root, most) {
  let level = [root], shown = 1;
  for (;;) {
    const more = level.reduce((sum, block) => sum + block.children.length, 0);
    if (!level.length || (shown > 1 && shown + more > most)) return;
    shown += more;
    for (const block of level) block.open = true;
    level = level.flatMap((block) => block.children.filter((child) => !child.op));
  }
}

function openAll(root) {
  let shown = 0;
  const visit = (block) => {
    block.open = shown < AT_MOST;
    shown += block.children.length;
    block.children.filter((child) => !child.op).forEach(visit);
  };
  visit(root);
  return shown < AT_MOST;
}

function closeAll(block) {
  block.children.filter((child) => !child.op).forEach((child) => {
    child.open = false;
    closeAll(child);
  });
}

// ------------------------------------------------------------------------------------------ layout

const HEAD = 28, PAD = 16, LETTER = 7.7;

function measure(node, phase) {
  if (node.op || !node.open) {
    const [title, under] = labels(node);
    node.width = Math.min(250, Math.max(96, 30 + LETTER * Math.max(title.length, under.length * 0.85)));
    node.height = 42;
    return;
  }
  const index = new Map();
  node.children.forEach((child, i) => {
    measure(child, phase);
    for (const op of child.operations) index.set(op.id, i);
  });
  const count = node.children.length, links = new Map();
  const link = (from, to, value) => {
    const key = from * (count + 2) + to;
    if (!links.has(key)) links.set(key, { from, to, values: new Set(), crosses: false });
    links.get(key).values.add(value);
    return links.get(key);
  };
  let entered = false, left = false;
  for (const op of node.operations) {
    for (const value of op.ins) {
      const maker = phase.makers.get(value);
      if (!maker || QUIET.has(maker.kind)) continue;
      const from = index.get(maker.id), to = index.get(op.id);
      if (from === to) continue;
      if (from === undefined) {
        if (node.parent) link(count, to, value);
        entered = true;
      } else if (maker.stage !== op.stage) link(from, to, value).crosses = true;
      else link(from, to, value);
    }
    for (const value of op.outs) {
      if (node.parent && (phase.takers.get(value) || []).some((taker) => !index.has(taker.id))) {
        link(index.get(op.id), count + 1, value);
        left = true;
      }
    }
  }
  const nodes = node.children.map((child) => ({ width: child.width, height: child.height, order: child.order }));
  nodes.push({ width: entered ? 2 : 0, height: 0, order: -1, first: true }, { width: left ? 2 : 0, height: 0, order: Infinity, last: true });
  node.links = [...links.values()];
  const found = layered(nodes, node.links.map(({ from, to }) => [from, to]));
  node.inner = found;
  node.children.forEach((child, i) => Object.assign(child, found.places[i]));
  node.width = Math.max(found.width + 2 * PAD, 30 + LETTER * nameOf(node).length);
  node.height = found.height + HEAD + PAD;
  node.shift = (node.width - found.width) / 2;
  // What comes from outside comes in at the middle of the upper side, and goes out at that of the lower one.
  node.links.forEach((each, i) => {
    each.path = found.paths[i];
    if (each.from === count) each.path[0] = [found.width / 2, -HEAD];
    if (each.to === count + 1) each.path[each.path.length - 1] = [found.width / 2, found.height + PAD];
  });
}

function labels(node) {
  if (!node.op) return [node.name, plural(node.operations.length, "operation")];
  const type = node.op.outs.length ? valueType(node.op.outs[0]) : `@${node.op.variable}`;
  return [node.name === node.op.kind ? node.op.kind : `${node.op.kind} · ${node.name}`, type];
}

const clip = (label, width) => {
  const most = Math.floor((width - 24) / LETTER);
  return label.length <= most ? label : `${label.slice(0, most - 1)}…`;
};

// ------------------------------------------------------------------------------------------ the view

function graphView() {
  const kinds = [...phases.keys()];
  const trees = new Map();
  let phase = phases.get(kinds.find((kind) => kind === "F" || kind === "main") || kinds[0]);
  let scale = 1, left = 0, top = 0, focused = null, selected = null;
  const drawn = new Map();
  const canvas = svg("g");
  const picture = svg("svg", { class: "graph", tabindex: 0, role: "application", "aria-label":
    "Model graph. Arrow keys go from node to node, Enter opens a block or an operation, plus and minus zoom, 0 fits.", focusable: "true" }, canvas);
  const tree = () => {
    if (!trees.has(phase.kind)) {
      const root = treeOf(phase);
      openSome(root, AT_FIRST);
      trees.set(phase.kind, root);
    }
    return trees.get(phase.kind);
  };

  function draw() {
    const root = tree();
    measure(root, phase);
    drawn.clear();
    put(canvas);
    drawInside(root, canvas, 0, 0);
    if (!drawn.has(focused)) focused = null;
    mark();
  }

  function drawInside(block, parent, x, y) {
    const inside = svg("g", { transform: `translate(${x + block.shift},${y + HEAD})` });
    parent.append(inside);
    for (const link of block.links) {
      if (!link.path) continue;
      const line = svg("path", { class: link.crosses ? "wire crosses" : "wire", d: curve(link.path) });
      line.addEventListener("pointermove", (event) => {
        const names = [...link.values].slice(0, 4).map((value) => [`%${valueName(value)}`, `${valueType(value)}, ${bytes(values[value][2])}`]);
        showTip(event.clientX, event.clientY, link.crosses ? "travels to another stage" : plural(link.values.size, "value"), names);
      });
      line.addEventListener("pointerleave", hideTip);
      inside.append(line);
    }
    for (const child of block.children) drawNode(child, inside);
  }

  function drawNode(node, parent) {
    const x = node.x - node.width / 2, y = node.y - node.height / 2;
    const stages = node.op ? [node.op.stage] : [...node.stages.keys()];
    const open = !node.op && node.open;
    const [title, under] = labels(node);
    const group = svg("g", { class: `node ${node.op ? "op" : "block"} ${open ? "open" : ""} ${stageClass(stages.length === 1 ? stages[0] : -1)}`,
      transform: `translate(${x},${y})`, role: "button", tabindex: -1, "aria-label": `${title}, ${under}`, "aria-expanded": node.op ? null : String(open) });
    if (!node.op && !open) group.append(svg("rect", { class: "behind", x: 3, y: 3, width: node.width, height: node.height, rx: 7 }));
    group.append(svg("rect", { class: "face", width: node.width, height: node.height, rx: open ? 10 : 7 }));
    let from = 0;
    const total = node.operations ? node.operations.length : 1;
    for (const stage of stages) {
      const share = node.op ? 1 : node.stages.get(stage) / total;
      const length = open ? 0 : node.height - 10;
      group.append(svg("rect", { class: `edge ${stageClass(stage)}`, x: 5, y: 5 + from * length, width: 4, height: share * length, rx: 2 }));
      from += share;
    }
    group.append(svg("text", { class: "title", x: open ? 12 : 17, y: 18 }, clip(title, node.width)));
    if (!open) group.append(svg("text", { class: "under", x: 17, y: 33 }, clip(under, node.width * 1.15)));
    group.addEventListener("click", (event) => {
      event.stopPropagation();
      if (!moved) act(node);
    });
    if (!open) {
      group.addEventListener("pointermove", (event) => showTip(event.clientX, event.clientY, title, tipOf(node)));
      group.addEventListener("pointerleave", hideTip);
    }
    parent.append(group);
    drawn.set(node, group);
    if (open) drawInside(node, group, 0, 0);
  }

  function tipOf(node) {
    if (!node.op) {
      const kinds = new Map();
      for (const op of node.operations) kinds.set(op.kind, (kinds.get(op.kind) || 0) + 1);
      const most = [...kinds].sort((a, b) => b[1] - a[1]).slice(0, 5).map(([kind, times]) => `${times} ${kind}`).join(", ");
      const stages = [...node.stages.keys()].filter((stage) => stage >= 0).sort((a, b) => a - b);
      return [["operations", String(node.operations.length)], ["mostly", most], ["stages", stages.join(", ")]];
    }
    const { op } = node;
    return [["results", op.outs.map(valueType).join(", ")], ["operands", op.ins.map(valueType).slice(0, 4).join(", ")], ["source", op.loc],
      ["stage", op.stage >= 0 ? String(op.stage) : ""], ["kernel", op.kernel]];
  }

  function act(node) {
    focused = node;
    if (node.op) {
      selected = node.op;
      mark();
      showOperation(node.op);
      return;
    }
    const before = placeOf(node);
    node.open = !node.open;
    draw();
    // What was clicked stays where it is on the screen.
    const after = placeOf(node);
    left += before.x - after.x;
    top += before.y - after.y;
    move();
    say(`${node.name} ${node.open ? "opened" : "closed"}`);
  }

  // The upper left corner of a node on the screen.
  function placeOf(node) {
    const group = drawn.get(node);
    if (!group) return { x: 0, y: 0 };
    const box = group.querySelector(".face").getBoundingClientRect();
    return { x: box.x, y: box.y, width: box.width, height: box.height };
  }

  function mark() {
    for (const [node, group] of drawn) {
      group.classList.toggle("selected", Boolean(selected && node.op === selected));
      group.classList.toggle("focused", node === focused);
    }
  }

  function move() {
    canvas.setAttribute("transform", `translate(${left.toFixed(1)},${top.toFixed(1)}) scale(${scale.toFixed(4)})`);
  }

  function zoom(factor, x = picture.clientWidth / 2, y = picture.clientHeight / 2) {
    const next = Math.max(0.03, Math.min(4, scale * factor));
    left = x - ((x - left) * next) / scale;
    top = y - ((y - top) * next) / scale;
    scale = next;
    move();
  }

  // All of it, if that can still be read; else its beginning.
  function fit(all = false) {
    const root = tree(), wide = picture.clientWidth, high = picture.clientHeight;
    if (!wide) return;
    const whole = Math.min(wide / (root.width + 20), high / (root.height + 20), 1.1);
    scale = all || whole > 0.5 ? whole : Math.min(0.8, wide / (root.width + 20));
    left = (wide - root.width * scale) / 2;
    top = root.height * scale > high ? 4 : (high - root.height * scale) / 2;
    move();
  }

  function center(node) {
    const box = placeOf(node), frame = picture.getBoundingClientRect();
    left += frame.x + frame.width / 2 - box.x - box.width / 2;
    top += frame.y + frame.height / 2 - box.y - box.height / 2;
    move();
  }

  // ---------------------------------------------------------------- pointer

  let grabbed = null, moved = false;
  const pointers = new Map();
  picture.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    grabbed = { x: event.clientX - left, y: event.clientY - top };
    moved = false;
  });
  addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const before = pointers.get(event.pointerId);
    if (pointers.size === 2) {
      const [other] = [...pointers.values()].filter((each) => each.pointerId !== event.pointerId);
      const distance = (a, b) => Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
      const box = picture.getBoundingClientRect();
      zoom(distance(event, other) / Math.max(1, distance(before, other)), (event.clientX + other.clientX) / 2 - box.x, (event.clientY + other.clientY) / 2 - box.y);
      moved = true;
    } else if (grabbed) {
      if (Math.hypot(event.clientX - left - grabbed.x, event.clientY - top - grabbed.y) > 4) moved = true;
      if (moved) {
        left = event.clientX - grabbed.x;
        top = event.clientY - grabbed.y;
        move();
        hideTip();
      }
    }
    pointers.set(event.pointerId, event);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      grabbed = null;
    });
  }
  picture.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = picture.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - box.x, event.clientY - box.y);
  }, { passive: false });

  // When the drawer takes room, the middle stays the middle.
  let width = 0;
  new ResizeObserver(() => {
    if (width && picture.clientWidth) {
      left += (picture.clientWidth - width) / 2;
      move();
    }
    width = picture.clientWidth || width;
  }).observe(picture);

  // ---------------------------------------------------------------- keys

  function step(dx, dy) {
    const nodes = [...drawn.keys()];
    if (!nodes.length) return;
    if (!focused) focused = nodes[0];
    else {
      const middle = (node) => {
        const box = placeOf(node);
        return [box.x + box.width / 2, box.y + (node.open ? 12 : box.height / 2)];
      };
      const [x, y] = middle(focused);
      let best = null, least = Infinity;
      for (const node of nodes) {
        const [nx, ny] = middle(node);
        const along = (nx - x) * dx + (ny - y) * dy, across = Math.abs((nx - x) * dy) + Math.abs((ny - y) * dx);
        if (node !== focused && along > 1 && along + 2.5 * across < least) [best, least] = [node, along + 2.5 * across];
      }
      if (best) focused = best;
    }
    mark();
    const box = placeOf(focused), frame = picture.getBoundingClientRect();
    if (box.x < frame.x || box.y < frame.y || box.x + box.width > frame.right || box.y + Math.min(box.height, 60) > frame.bottom) center(focused);
    say(`${labels(focused).join(", ")}${focused.op ? "" : focused.open ? ", open" : ", closed"}`);
  }

  picture.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act_on = {
      ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1), ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0),
      "+": () => zoom(1.25), "=": () => zoom(1.25), "-": () => zoom(0.8), 0: () => fit(true),
      Enter: () => focused && act(focused), " ": () => focused && act(focused),
    }[event.key];
    if (!act_on) return;
    event.preventDefault();
    act_on();
  });

  // ---------------------------------------------------------------- all of it

  const redraw = () => {
    draw();
    fit();
  };
  const pick = el("div", { class: "pick" });
  const setPhase = (kind) => {
    phase = phases.get(kind);
    focused = null;
    put(pick, choice("Part of the program", kinds.map((each) => [each, phaseName(each)]), kind, (chosen) => {
      setPhase(chosen);
      redraw();
    }));
  };
  setPhase(phase.kind);
  const legend = el("div", { class: "legend" }, facts.summary.stages.map(([stage]) => stageChip(stage)));
  const tools = el("div", { class: "tools" }, pick,
    button("Open all", () => {
      if (!openAll(tree())) say("as many blocks are open as can be drawn");
      redraw();
    }),
    button("Close all", () => {
      closeAll(tree());
      redraw();
    }),
    el("span", { class: "together" },
      button("−", () => zoom(0.8), { "aria-label": "Zoom out" }), button("Fit", () => fit(true)), button("+", () => zoom(1.25), { "aria-label": "Zoom in" })));

  return {
    node: el("div", { class: "graph-view" }, view.title("Model graph", "Blocks are those of the source. Click one to open it, an operation to see what became of it."),
      el("div", { class: "toolbar" }, tools, legend), el("div", { class: "stagebox" }, picture)),
    shown: () => {
      if (!drawn.size) redraw();
    },
    // Opens whatever an operation stands in, and shows it.
    reveal(op) {
      if (phase !== phases.get(op.graph.kind)) setPhase(op.graph.kind);
      selected = op;
      let found = null;
      const visit = (block) => {
        for (const child of block.children) {
          if (child.op === op) found = child;
          else if (!child.op && child.operations.includes(op)) {
            child.open = true;
            visit(child);
          }
        }
      };
      visit(tree());
      draw();
      if (!found) return false;
      focused = found;
      mark();
      if (scale < 0.5) scale = 0.8;
      move();
      center(found);
      return true;
    },
  };
}
