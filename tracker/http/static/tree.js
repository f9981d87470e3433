// The tree of one stripe: a node for each host, below its parent. A tree of another shape is laid out, and shown when all of it is drawn;
// otherwise only the nodes that changed are drawn again.

import { dye, element, nearest, ROWS_PER_STEP, setAttribute, setText, shade, Sheet, sizeOf } from "./canvas.js";
import { AWAY, changedNodes, hosts, layouts, nodes, NO_PARENT, ORIGIN, WHOLE } from "./feed.js";

const NAMED_MAX = 40; // nodes that have their names beside them
const TOP_PX = 16, RISE_PX_MAX = 60; // above the origin, and at most from a host to the one above it
const NAME_PX = 84; // room for a name; names of hosts that are closer stand upright
const HEIGHT_PX_MAX = 420;
const sheet = new Sheet(element("#tree canvas"));
let shape = null; // {root, order, loose, width, height, rows, layout}: the tree as it was laid out last; null when all is to be drawn anew

export function forgetShape() {
  shape = null;
}

// The tree as links between nodes (`above`, `below`), with depths, in the order of a walk from the top. The parent of a host that has the whole
// stripe is its last one, and such parents may form circles with those of now: of nodes that no root reaches, one that has the whole stripe is
// taken as the top.
function* shapeTree() {
  const root = { number: ORIGIN, depth: 0, below: [], above: null, x: 0, y: TOP_PX, low: 0, high: 0, seen: false };
  const order = [], tops = [], loose = [];
  for (const node of nodes.values()) {
    node.above = null;
    node.loose = node.seen = false;
    node.below.length = 0;
  }
  yield;
  for (const node of nodes.values()) {
    const parent = node.parent === ORIGIN ? root : nodes.get(node.parent);
    if (parent) parent.below.push(node);
    else tops.push(node);
  }
  yield;
  const visit = (top) => {
    const open = [top];
    top.seen = true;
    top.depth = 0;
    while (open.length) {
      const node = open.pop();
      order.push(node);
      for (let i = node.below.length - 1; i >= 0; i -= 1) {
        const child = node.below[i];
        if (child.seen) continue;
        child.seen = true;
        child.above = node;
        child.depth = node.depth + 1;
        open.push(child);
      }
    }
  };
  visit(root);
  yield;
  for (const top of tops) {
    if (top.below.length) visit(top);
    else {
      top.loose = top.seen = true;
      loose.push(top);
    }
  }
  if (order.length - 1 + loose.length < nodes.size) {
    for (const whole of [true, false]) {
      for (const node of nodes.values()) {
        if ((node.done === WHOLE) === whole && !node.seen) visit(node);
      }
    }
  }
  return { root, order, loose };
}

function* layTree(width) {
  const { root, order, loose } = yield* shapeTree();
  yield;
  let deepest = 1, ends = 0;
  for (const node of order) {
    deepest = Math.max(deepest, node.depth);
    node.low = Infinity;
    node.high = -Infinity;
  }
  for (let i = order.length - 1; i >= 0; i -= 1) { // an end is a node without children
    const node = order[i];
    if (node.low === Infinity) ends += 1;
    if (node.above) node.above.low = 0;
  }
  const named = nodes.size <= NAMED_MAX, cell = named ? NAME_PX + 8 : 7, line = named ? 16 : 7;
  const across = Math.max(1, Math.floor((width - 120) / cell)), rows = Math.ceil(loose.length / across);
  const pitch = (width - 16) / Math.max(1, ends), upright = named && pitch < NAME_PX + 12;
  const rest = TOP_PX + (upright ? NAME_PX : 14) + (rows ? rows * line + 12 : 0);
  const rise = order.length > 1 ? Math.min(RISE_PX_MAX, (HEIGHT_PX_MAX - rest) / deepest) : 0, height = Math.ceil(rest + rise * deepest);
  for (const node of order) {
    if (node.low === 0) node.low = Infinity;
    else node.low = node.high = NaN;
  }
  yield;
  let end = ends;
  for (let i = order.length - 1; i >= 0; i -= 1) {
    const node = order[i], above = node.above;
    if (node.low !== node.low) node.x = 8 + pitch * ((end -= 1) + 0.5);
    else node.x = (node.low + node.high) / 2;
    node.y = TOP_PX + rise * node.depth;
    if (!above) continue;
    above.low = Math.min(above.low, node.x);
    above.high = Math.max(above.high, node.x);
  }
  loose.forEach((node, i) => {
    node.x = 120 + (i % across) * cell;
    node.y = height - line * rows + Math.floor(i / across) * line;
  });
  return { root, order, loose, width, height, rows, line, upright };
}

// Draw what changed, in steps.
export function* drawTree() {
  const canvas = element("#tree canvas"), [width] = sizeOf(canvas), layout = layouts.tree;
  const current = shape && shape.layout === layout && shape.width === width;
  if (current && !changedNodes.size && !sheet.unseen) return;
  let seen = 0;
  if (current) {
    for (const node of changedNodes) {
      changedNodes.delete(node);
      drawNode(node);
      if ((seen += 1) % ROWS_PER_STEP === 0) yield;
    }
    sheet.show();
    return;
  }
  const tree = yield* layTree(width), strength = nodes.size > 1000 ? 0.5 : 1;
  changedNodes.clear();
  shape = null; // until all of it is drawn
  sheet.begin(width, tree.height);
  yield;
  for (const whole of [true, false]) {
    for (const node of tree.order) {
      if (!node.above || (node.done === WHOLE) !== whole) continue;
      sheet.line(node.above.x, node.above.y, node.x, node.y, whole ? dye.edge : dye.accent, strength);
      if ((seen += 1) % ROWS_PER_STEP === 0) yield;
    }
  }
  for (const node of nodes.values()) {
    drawNode(node);
    if (nodes.size <= NAMED_MAX) drawName(node, tree);
    if ((seen += 1) % ROWS_PER_STEP === 0) yield;
  }
  const title = { size: 12, bold: true };
  if (tree.root.below.length) sheet.write("origin", Math.max(20, Math.min(width - 20, tree.root.x)), 6, { ...title, align: "center" });
  if (tree.rows) sheet.write("outside the tree", 0, tree.height - tree.line * tree.rows, title);
  sheet.show();
  shape = { ...tree, layout };
  setAttribute(canvas, "aria-label", `tree of ${nodes.size} hosts`);
}

function drawNode(node) {
  const host = hosts.get(node.number), size = nodes.size <= 100 ? 9 : nodes.size <= 1000 ? 5 : 3;
  sheet.square(node.x - size / 2, node.y - size / 2, size, host && host.flags & AWAY ? dye.away : shade(node.done));
}

// A name is beside its node, or upright below one that has no children where these are close together.
function drawName(node, tree) {
  const host = hosts.get(node.number);
  if (!host) return;
  const upright = tree.upright && !node.loose && node.low !== node.low, left = !upright && !node.loose && node.x > tree.width - NAME_PX;
  const name = host.name.length > 13 ? `${host.name.slice(0, 12)}…` : host.name;
  sheet.write(name, node.x + (upright ? 0 : left ? -9 : 9), node.y + (upright ? 9 : 0), { size: 11, align: left ? "right" : "left", upright });
}

// The host at the pointer, null for none.
export const nodeAt = (event) => {
  const node = nearest(nodes.values(), event.offsetX, event.offsetY, 12);
  return node && hosts.get(node.number) || null;
};

export function describeNode(event) {
  const node = nearest(nodes.values(), event.offsetX, event.offsetY, 12), name = (number) => (hosts.get(number) || { name: "?" }).name;
  const from = node && (node.parent === ORIGIN ? "the origin" : node.parent === NO_PARENT ? "no host" : name(node.parent));
  setText(element("#tree output"), node ? `${name(node.number)}: ${node.done / 10} % of the stripe, from ${from}` : "");
}
