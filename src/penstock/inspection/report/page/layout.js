// Where the nodes of a directed graph stand: in layers from top to bottom, long edges around what is in between.
//
// In: nodes {width, height, order} and edges [from, to] by number; an edge that goes against the order of its nodes does not count for layers.
// Out: x and y of the middle of every node, a path of points for every edge, and the size of it all. Linear but for the few sweeps over the layers.

const GAP_X = 22, GAP_Y = 34, SWEEPS = 6, LONGEST = 60;

function layered(nodes, edges) {
  const layers = layersOf(nodes, edges);
  const cells = nodes.map((node, i) => ({ node: i, layer: layers[i], width: node.width, height: node.height, up: [], down: [], x: 0 }));
  const routes = edges.map(([from, to]) => route(cells, layers, from, to));
  const rows = [];
  for (const cell of cells) (rows[cell.layer] ||= []).push(cell);
  for (let i = 0; i < rows.length; i++) rows[i] ||= [];
  order(rows, nodes);
  place(rows);
  const left = Math.min(0, ...cells.map((cell) => cell.x - cell.width / 2));
  let y = 0;
  for (const row of rows) {
    const height = Math.max(0, ...row.map((cell) => cell.height));
    for (const cell of row) {
      cell.y = y + height / 2;
      cell.x -= left;
    }
    y += height + GAP_Y;
  }
  return {
    places: nodes.map((_, i) => ({ x: cells[i].x, y: cells[i].y })),
    paths: routes.map((chain) => chain && points(chain)),
    width: Math.max(0, ...cells.map((cell) => cell.x + cell.width / 2)),
    height: Math.max(0, y - GAP_Y),
  };
}

// The longest way from the top; what nobody comes before stands right above what it is for.
function layersOf(nodes, edges) {
  const sorted = nodes.map((_, i) => i).sort((a, b) => nodes[a].order - nodes[b].order);
  const rank = new Array(nodes.length);
  sorted.forEach((node, i) => (rank[node] = i));
  const down = nodes.map(() => []), fed = nodes.map(() => false);
  for (const [from, to] of edges) {
    if (rank[from] < rank[to]) {
      down[from].push(to);
      fed[to] = true;
    }
  }
  const layers = nodes.map(() => 0);
  for (const node of sorted) for (const to of down[node]) layers[to] = Math.max(layers[to], layers[node] + 1);
  const last = Math.max(0, ...layers);
  for (const node of sorted) {
    if (nodes[node].last) layers[node] = last;
    else if (!fed[node] && !nodes[node].first && down[node].length) layers[node] = Math.min(...down[node].map((to) => layers[to])) - 1;
  }
  return layers;
}

// The cells that an edge goes through: its ends, and one in every layer between them.
function route(cells, layers, from, to) {
  const [top, bottom] = layers[from] <= layers[to] ? [from, to] : [to, from];
  if (layers[top] === layers[bottom]) return [cells[from], cells[to]];
  const chain = [cells[top]];
  for (let layer = layers[top] + 1; layer < layers[bottom] && layers[bottom] - layers[top] < LONGEST; layer++) {
    const cell = { node: -1, layer, width: 8, height: 0, up: [], down: [], x: 0 };
    cells.push(cell);
    chain.push(cell);
  }
  chain.push(cells[bottom]);
  for (let i = 1; i < chain.length; i++) {
    chain[i - 1].down.push(chain[i]);
    chain[i].up.push(chain[i - 1]);
  }
  return top === from ? chain : chain.reverse();
}

// Few crossings: every cell goes to the middle of its neighbours in the row before, down and up in turn.
function order(rows, nodes) {
  const begin = (cell) => (cell.node >= 0 ? nodes[cell.node].order : begin(cell.up[0]));
  for (const row of rows) row.sort((a, b) => begin(a) - begin(b)).forEach((cell, i) => (cell.at = i));
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const downward = sweep % 2 === 0;
    for (const row of downward ? rows : [...rows].reverse()) {
      for (const cell of row) {
        const near = downward ? cell.up : cell.down;
        cell.wish = near.length ? near.reduce((sum, other) => sum + other.at / Math.max(1, rows[other.layer].length), 0) / near.length : cell.at / row.length;
      }
      row.sort((a, b) => a.wish - b.wish || a.at - b.at).forEach((cell, i) => (cell.at = i));
    }
  }
}

// In that order, as near to above and below their neighbours as they can be without touching.
function place(rows) {
  for (const row of rows) {
    let x = 0;
    for (const cell of row) {
      cell.x = x + cell.width / 2;
      x += cell.width + GAP_X;
    }
    const middle = (x - GAP_X) / 2;
    for (const cell of row) cell.x -= middle;
  }
  for (let sweep = 0; sweep < 2 * SWEEPS; sweep++) {
    const downward = sweep % 2 === 0;
    for (const row of downward ? rows : [...rows].reverse()) {
      for (const cell of row) {
        const near = downward ? cell.up : cell.down;
        cell.wish = near.length ? near.reduce((sum, other) => sum + other.x, 0) / near.length : cell.x;
      }
      settle(row);
    }
  }
}

// Wishes that collide are met halfway: cells that touch become a block that stands where its cells wish on average.
function settle(row) {
  const blocks = [];
  for (const cell of row) {
    let block = { cells: [cell], start: cell.wish - cell.width / 2, width: cell.width };
    for (let before = blocks[blocks.length - 1]; before && before.start + before.width + GAP_X > block.start; before = blocks[blocks.length - 1]) {
      blocks.pop();
      const cells = [...before.cells, ...block.cells];
      let offset = 0, sum = 0;
      for (const one of cells) {
        sum += one.wish - one.width / 2 - offset;
        offset += one.width + GAP_X;
      }
      block = { cells, start: sum / cells.length, width: offset - GAP_X };
    }
    blocks.push(block);
  }
  for (const block of blocks) {
    let x = block.start;
    for (const cell of block.cells) {
      cell.x = x + cell.width / 2;
      x += cell.width + GAP_X;
    }
  }
}

function points(chain) {
  const downward = chain[0].y <= chain[chain.length - 1].y;
  return chain.map((cell, i) => {
    const edge = i === 0 ? 1 : i === chain.length - 1 ? -1 : 0;
    return [cell.x, cell.y + (edge * (downward ? 1 : -1) * cell.height) / 2];
  });
}

// A smooth line through points that leaves and enters upright.
function curve(way) {
  let path = `M${way[0][0].toFixed(1)},${way[0][1].toFixed(1)}`;
  for (let i = 1; i < way.length; i++) {
    const [[x0, y0], [x1, y1]] = [way[i - 1], way[i]];
    const middle = ((y0 + y1) / 2).toFixed(1);
    path += `C${x0.toFixed(1)},${middle} ${x1.toFixed(1)},${middle} ${x1.toFixed(1)},${y1.toFixed(1)}`;
  }
  return path;
}
