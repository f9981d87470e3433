"use strict";
// Shows what /v1/events tells (tracker/core/views/view.py): everything at first, then what changed. Names come from the network, so they
// are only ever set as text.
//
// What is told is noted at once and shown in frames: work is cut into steps, of which each frame takes as many as fit into FRAME_MS, so
// that thousands of hosts never keep the page from answering. Hosts and trees are drawn on canvases. Of hosts that are drawn only those
// that changed are drawn again; a tree that changed its shape is drawn behind the scenes and shown when it is whole.

const AWAY = 1, RECEIVING = 2, SLOW = 4, BLAMED = 8;
const ORIGIN = -1, NOBODY = -2, ABSENT = -1, WHOLE = 1000;
const STORY_LINES_MAX = 300, RETRY_MS = 3000, LABEL_PX_MAX = 92, FRAME_MS = 8, AT_ONCE = 250, NAMED_MAX = 40, TREE_TOP_PX = 16;
const RAMPS = {
  light: ramp(["#00224e", "#35456c", "#666970", "#8d8460", "#b08f00"], 101),
  dark: ramp(["#4a5f94", "#6f7896", "#93918a", "#c7b96f", "#fee838"], 101),
};

const hosts = new Map(); // number -> {number, name, key, zone, rack, done, flags, x, y}; key: the name, in the order that people expect
const nodes = new Map(); // number -> {number, done, parent, x, y}: the tree that is watched
let swarms = [], chosen = null, stripe = 0, source = null, scrolled = false;
let placed = null; // where hosts are drawn, null when that is to be found anew
let shape = null; // the tree as it was laid out last, null when it has changed since
let news = null; // what was told and is not shown yet; only the last word on tables counts
let steps = null, frame = 0; // the work under way, and whether a frame was asked for
const changedHosts = new Set(), changedNodes = new Set();
const sizes = new Map(); // canvas -> [width, height], so that painting need not wait for a layout
const measured = { updates: 0, all_ms: [], longest_ms: [], update: null };
window.swarmHealth = { measured, hosts, nodes, idle: () => !frame && !steps };

const at = (path) => document.querySelector(path);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let ink = {};

function readInk() {
  ink = { text: style("--ink"), faint: style("--faint"), edge: style("--edge"), sheet: style("--sheet"),
    away: style("--away"), slow: style("--slow"), blamed: style("--blamed"), accent: style("--accent"),
    ramp: matchMedia("(prefers-color-scheme: dark)").matches ? RAMPS.dark : RAMPS.light };
}

function ramp(stops, steps) {
  const parts = stops.map((each) => [1, 3, 5].map((from) => parseInt(each.slice(from, from + 2), 16)));
  return Array.from({ length: steps }, (_, step) => {
    const place = (step / (steps - 1)) * (parts.length - 1), below = Math.min(Math.floor(place), parts.length - 2);
    const mixed = parts[below].map((low, i) => Math.round(low + (parts[below + 1][i] - low) * (place - below)));
    return `rgb(${mixed.join(",")})`;
  });
}

// -- words

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(count) < 1024 || unit === "TiB") return `${unit === "B" ? Math.round(count) : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
}

function seconds(count) {
  if (count === null) return "";
  if (count < 90) return `${count < 9.95 ? count.toFixed(1) : Math.round(count)} s`;
  return count < 5400 ? `${Math.round(count / 60)} min` : `${(count / 3600).toFixed(1)} h`;
}

const short = (digest) => digest.replace("sha256:", "").slice(0, 12);

function make(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

// -- what is told

function connect() {
  if (source) source.close();
  const query = chosen ? `?swarm=${encodeURIComponent(chosen)}&stripe=${stripe}` : "";
  const opened = source = new EventSource(`v1/events${query}`);
  opened.addEventListener("change", (event) => {
    endUpdate();
    measured.update = { all_ms: 0, longest_ms: 0 };
    timed(() => apply(JSON.parse(event.data)));
    wake();
  });
  opened.addEventListener("preseeds", (event) => showPreseeds(JSON.parse(event.data)));
  opened.onopen = () => tellConnection("live", false);
  opened.onerror = () => {
    tellConnection("no answer from the tracker, trying again", true);
    if (opened.readyState === EventSource.CLOSED) {
      chosen = null; // the swarm may be no more
      setTimeout(() => { if (source === opened) connect(); }, RETRY_MS);
    }
  };
}

// -- frames

function wake() {
  if (!frame) frame = requestAnimationFrame(work);
}

// One frame. What came since the last one is shown from the beginning; what was begun before is given up, as it is done again.
function work() {
  frame = 0;
  timed(() => {
    const until = performance.now() + FRAME_MS;
    if (news || !steps) steps = show();
    while (steps && performance.now() < until) {
      if (steps.next().done) steps = null;
    }
  });
  if (steps) wake();
  else endUpdate();
}

function* show() {
  const told = news;
  news = null;
  if (told) {
    showTotals(told.totals);
    showSwarms(told.swarms);
    yield;
    showTroubled(told.troubled);
    yield;
    yield* showStory(told.story);
  }
  yield* drawHosts();
  yield* drawTree();
}

function timed(part) {
  const began = performance.now();
  part();
  const took = performance.now() - began, update = measured.update;
  if (!update) return;
  update.all_ms += took;
  update.longest_ms = Math.max(update.longest_ms, took);
}

function endUpdate() {
  const update = measured.update;
  if (!update) return;
  measured.update = null;
  measured.updates += 1;
  for (const name of ["all_ms", "longest_ms"]) {
    measured[name].push(update[name]);
    if (measured[name].length > 1000) measured[name].shift();
  }
}

function tellConnection(text, lost) {
  at("#connection").textContent = text;
  at("#connection").classList.toggle("lost", lost);
}

function apply(change) {
  if (change.whole) {
    hosts.clear();
    nodes.clear();
    changedHosts.clear();
    changedNodes.clear();
    placed = shape = news = null;
    at("#story ol").replaceChildren();
  }
  for (const [number, name, zone, rack] of change.hosts) {
    const known = hosts.get(number) || { number, name: "", key: "", zone, rack, done: WHOLE, flags: 0, x: 0, y: 0 };
    if (known.name !== name) known.key = name.replace(/\d+/g, (digits) => digits.padStart(12, "0"));
    known.name = name;
    known.zone = zone;
    known.rack = rack;
    hosts.set(number, known);
    placed = null;
  }
  for (const number of change.forgotten) {
    if (hosts.delete(number)) placed = null;
  }
  for (const [number, done, flags] of change.states) {
    const host = hosts.get(number);
    if (!host) continue;
    host.done = done;
    host.flags = flags;
    changedHosts.add(host);
  }
  for (const [number, done, parent] of change.tree) {
    const node = nodes.get(number);
    if (done === ABSENT) {
      if (nodes.delete(number)) shape = null;
    } else if (!node) {
      nodes.set(number, { number, done, parent, x: 0, y: 0, above: null, depth: 0, low: 0, high: 0, below: [], loose: false });
      shape = null;
    } else {
      if (node.parent !== parent || (node.done === WHOLE) !== (done === WHOLE)) shape = null; // whose edge is drawn otherwise
      node.done = done;
      node.parent = parent;
      changedNodes.add(node);
    }
  }
  const story = (news ? news.story : []).concat(change.story).slice(-STORY_LINES_MAX);
  news = { totals: change.totals, swarms: change.swarms, troubled: change.troubled, story };
}

// -- tables

function showTotals(totals) {
  const shown = {
    hosts: totals.hosts, receiving: totals.receiving, away: totals.away, slow: totals.slow, blamed: totals.blamed,
    swarms: `${totals.swarms}, ${totals.running} running${totals.stalled ? `, ${totals.stalled} stalled` : ""}`,
    "origin leases": totals.origin_leases, delivered: `${bytes(totals.rate_bytes_s)}/s`,
  };
  const list = at("#totals");
  if (!list.children.length) {
    for (const name of Object.keys(shown)) {
      const pair = make("div");
      pair.append(make("dt", name), make("dd"));
      list.append(pair);
    }
  }
  Object.values(shown).forEach((value, i) => setText(list.children[i].lastChild, String(value)));
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function showSwarms(rows) {
  swarms = rows;
  const body = at("#swarms tbody");
  while (body.children.length > rows.length) body.lastChild.remove();
  while (body.children.length < rows.length) body.append(swarmLine());
  rows.forEach((row, i) => fillSwarm(body.children[i], row));
  if (!chosen && rows.length) choose(rows[0].digest, 0);
  const mine = rows.find((row) => row.digest === chosen);
  if (mine) showStripes(mine);
}

function swarmLine() {
  const line = make("tr");
  for (let i = 0; i < 7; i += 1) line.append(make("td"));
  const button = make("button");
  button.append(make("code"));
  line.children[0].append(button, " ", make("span"));
  line.children[3].append(make("progress"), " ", make("span"));
  line.addEventListener("click", () => choose(line.dataset.digest, 0));
  return line;
}

function fillSwarm(line, row) {
  const cells = line.children, share = row.bytes_wanted ? row.bytes_held / row.bytes_wanted : 1;
  line.dataset.digest = row.digest;
  line.title = row.digest;
  line.classList.toggle("chosen", row.digest === chosen);
  setText(cells[0].firstChild.firstChild, short(row.digest));
  setText(cells[0].lastChild, `${bytes(row.size)}${row.priority === "preseed" && row.state !== "seeded" ? ", preseed" : ""}`);
  setText(cells[1], row.state);
  cells[1].className = `state-${row.state}`;
  setText(cells[2], `${row.complete} of ${row.hosts}`);
  cells[3].firstChild.value = share;
  setText(cells[3].lastChild, `${(Math.floor(share * 1000) / 10).toFixed(1)} %`);
  setText(cells[4], row.state === "seeded" ? "" : `${bytes(row.rate_bytes_s)}/s`);
  setText(cells[5], row.state === "seeded" ? "" : row.eta_s === null ? "unknown" : seconds(row.eta_s));
  setText(cells[6], String(row.origin_leases));
}

function choose(digest, number) {
  if (digest === chosen && number === stripe) return;
  chosen = digest;
  stripe = number;
  connect();
}

function showStripes(row) {
  const select = at("#tree select");
  while (select.options.length > row.stripes) select.lastChild.remove();
  while (select.options.length < row.stripes) {
    select.append(make("option", String(select.options.length)));
  }
  if (select.value !== String(stripe)) select.value = String(stripe);
  setText(at("#tree .of"), `of ${short(row.digest)}`);
}

function showTroubled(rows) {
  const body = at("#troubled tbody");
  while (body.children.length > rows.length) body.lastChild.remove();
  while (body.children.length < rows.length) {
    const line = make("tr");
    line.append(make("td"), make("td", undefined, "why"));
    body.append(line);
  }
  rows.forEach(([number, why], i) => {
    const host = hosts.get(number);
    setText(body.children[i].firstChild, host ? host.name : "");
    setText(body.children[i].lastChild, why);
  });
}

function showPreseeds(rows) {
  at("#preseeds tbody").replaceChildren(...rows.reverse().map((row) => {
    const line = make("tr");
    line.append(make("td", row.package), make("td", row.state, `state-${row.state}`));
    line.append(make("td", `${row.hosts_done} of ${row.hosts_total} hosts`), make("td", row.id));
    return line;
  }));
}

function* showStory(rows) {
  const list = at("#story ol");
  for (let from = 0; from < rows.length; from += AT_ONCE / 5) {
    const lines = document.createDocumentFragment();
    for (const row of rows.slice(from, from + AT_ONCE / 5).reverse()) {
      const line = make("li"), when = new Date(Date.now() - row.age_s * 1000);
      const time = make("time", when.toTimeString().slice(0, 8));
      time.dateTime = when.toISOString();
      line.append(time, row.swarm ? `${short(row.swarm).slice(0, 6)}: ${row.event}` : row.event);
      lines.append(line);
    }
    const height = scrolled ? list.scrollHeight : 0;
    list.prepend(lines);
    while (list.children.length > STORY_LINES_MAX) list.lastChild.remove();
    if (scrolled) list.scrollTop += list.scrollHeight - height; // who reads further down is not moved
    yield;
  }
  if (rows.length) filterStory();
}

function filterStory() {
  const wanted = at("#story input").value.toLowerCase();
  if (!wanted && !at("#story li[hidden]")) return;
  for (const line of at("#story ol").children) line.hidden = !line.textContent.toLowerCase().includes(wanted);
}

// -- canvases

function sizeOf(canvas) {
  if (!sizes.has(canvas)) sizes.set(canvas, [canvas.clientWidth, canvas.clientHeight]);
  return sizes.get(canvas);
}

const scale = () => window.devicePixelRatio || 1;

function penOf(canvas) {
  const pen = canvas.getContext("2d");
  pen.setTransform(scale(), 0, 0, scale(), 0, 0);
  return pen;
}

// A pen for a canvas that nobody sees, and how to show what was drawn with it.
function behind(canvas, width, height) {
  const hidden = document.createElement("canvas");
  hidden.width = Math.round(width * scale());
  hidden.height = Math.round(height * scale());
  const reveal = () => {
    if (canvas.clientHeight !== height) canvas.style.height = `${height}px`;
    if (canvas.width !== hidden.width) canvas.width = hidden.width;
    if (canvas.height !== hidden.height) canvas.height = hidden.height;
    const shown = canvas.getContext("2d");
    shown.setTransform(1, 0, 0, 1, 0, 0);
    shown.clearRect(0, 0, hidden.width, hidden.height);
    shown.drawImage(hidden, 0, 0);
  };
  return [penOf(hidden), reveal];
}

const shade = (done) => ink.ramp[Math.floor(done / 10)];

const shortened = (rack) => (rack.length > 14 ? `${rack.slice(0, 13)}…` : rack);
const ordered = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

// Racks of a zone stand in columns that are all as wide as the largest rack.
function* placeHosts(width) {
  const size = hosts.size <= 60 ? 22 : hosts.size <= 200 ? 16 : hosts.size <= 1500 ? 9 : 5, step = size + (size > 5 ? 2 : 1);
  const zones = new Map(), labels = [], pen = at("#hosts canvas").getContext("2d");
  let seen = 0;
  for (const host of hosts.values()) {
    let racks = zones.get(host.zone);
    if (!racks) zones.set(host.zone, (racks = new Map()));
    const members = racks.get(host.rack);
    if (members) members.push(host);
    else racks.set(host.rack, [host]);
    if ((seen += 1) % (4 * AT_ONCE) === 0) yield;
  }
  const keyed = (names) => [...names].map((name) => [name.replace(/\d+/g, (digits) => digits.padStart(12, "0")), name])
    .sort((a, b) => ordered(a[0], b[0])).map(([, name]) => name);
  let y = 0, label = 0;
  pen.font = "10px system-ui, sans-serif";
  for (const racks of zones.values()) {
    for (const rack of racks.keys()) {
      if (rack) label = Math.max(label, Math.min(LABEL_PX_MAX, Math.ceil(pen.measureText(shortened(rack)).width) + 8));
    }
  }
  for (const zone of keyed(zones.keys())) {
    const racks = zones.get(zone);
    labels.push([0, y + 8, zone ? `zone ${zone}` : "no zone", true]);
    y += 20;
    let most = 0;
    for (const members of racks.values()) most = Math.max(most, members.length);
    const columns = Math.max(1, Math.min(most, Math.floor((width - label) / step))), wide = label + columns * step + 12;
    const across = Math.max(1, Math.floor((width + 12) / wide));
    let place = 0, tall = 0;
    for (const rack of keyed(racks.keys())) {
      const members = racks.get(rack);
      if (place === across) {
        place = 0;
        y += tall + 3;
        tall = 0;
      }
      const x = place * wide + label;
      if (rack) labels.push([x - 6, y + size / 2, shortened(rack), false]);
      members.sort((a, b) => ordered(a.key, b.key));
      for (let i = 0; i < members.length; i += 1) {
        members[i].x = x + (i % columns) * step;
        members[i].y = y + Math.floor(i / columns) * step;
      }
      tall = Math.max(tall, Math.ceil(members.length / columns) * step, 11);
      place += 1;
      if (place === across) yield;
    }
    y += tall + 10;
  }
  return { size, labels, height: Math.max(20, y), width };
}

function* drawHosts() {
  const canvas = at("#hosts canvas");
  if (placed && !changedHosts.size) return;
  if (!placed) {
    const found = yield* placeHosts(sizeOf(canvas)[0]);
    changedHosts.clear();
    const [pen, reveal] = behind(canvas, found.width, found.height);
    pen.textBaseline = "middle";
    for (const [x, y, text, strong] of found.labels) {
      pen.font = `${strong ? "600 12" : "10"}px system-ui, sans-serif`;
      pen.fillStyle = strong ? ink.text : ink.faint;
      pen.textAlign = strong ? "left" : "right";
      pen.fillText(text, x, y);
    }
    yield;
    let drawn = 0;
    for (const host of hosts.values()) {
      drawHost(pen, host, found.size);
      if ((drawn += 1) % AT_ONCE === 0) yield;
    }
    reveal();
    placed = found;
  } else {
    const pen = penOf(canvas);
    let drawn = 0;
    for (const host of changedHosts) {
      changedHosts.delete(host);
      drawHost(pen, host, placed.size);
      if ((drawn += 1) % AT_ONCE === 0) yield;
    }
  }
  canvas.setAttribute("aria-label", `${hosts.size} hosts`);
}

function drawHost(pen, host, size) {
  const mark = host.flags & AWAY ? ink.away : host.flags & BLAMED ? ink.blamed : host.flags & SLOW ? ink.slow : null;
  if (host.flags & AWAY) pen.clearRect(host.x, host.y, size, size);
  else {
    pen.fillStyle = shade(host.done);
    pen.fillRect(host.x, host.y, size, size);
  }
  if (!mark) return;
  const line = size > 5 ? 2 : 1.5; // inside the square, which is all that is painted over when the mark goes
  pen.strokeStyle = mark;
  pen.lineWidth = line;
  pen.strokeRect(host.x + line / 2, host.y + line / 2, size - line, size - line);
}

// The tree as links between nodes (`above`, `below`), with depths, in the order of a walk from the top. Parents of hosts that have everything
// are those of before, and may form circles with those of now: what no root reaches is hung up at one of its hosts that has everything.
function* shapeTree() {
  const root = { number: ORIGIN, depth: 0, below: [], above: null, x: 0, y: TREE_TOP_PX, low: 0, high: 0 };
  const order = [], tops = [], visited = new Set(), loose = [];
  for (const node of nodes.values()) {
    node.above = null;
    node.loose = false;
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
    visited.add(top);
    top.depth = 0;
    while (open.length) {
      const node = open.pop();
      order.push(node);
      for (let i = node.below.length - 1; i >= 0; i -= 1) {
        const child = node.below[i];
        if (visited.has(child)) continue;
        visited.add(child);
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
      top.loose = true;
      loose.push(top);
    }
  }
  if (visited.size - 1 + loose.length < nodes.size) {
    for (const whole of [true, false]) {
      for (const node of nodes.values()) {
        if (!node.loose && (node.done === WHOLE) === whole && !visited.has(node)) visit(node);
      }
    }
  }
  return { root, order, loose };
}

function* layTree(width, height) {
  const { root, order, loose } = yield* shapeTree();
  yield;
  let deepest = 1, ends = 0;
  for (const node of order) {
    deepest = Math.max(deepest, node.depth);
    node.low = Infinity;
    node.high = -Infinity;
  }
  for (let i = order.length - 1; i >= 0; i -= 1) { // an end is a node that nobody hangs below
    const node = order[i];
    if (node.low === Infinity) ends += 1;
    if (node.above) node.above.low = 0;
  }
  const across = Math.max(1, Math.floor((width - 130) / 7)), rows = Math.ceil(loose.length / across);
  const rise = (height - TREE_TOP_PX - 14 - (rows ? rows * 7 + 12 : 0)) / deepest, pace = (width - 16) / Math.max(1, ends);
  for (const node of order) {
    if (node.low === 0) node.low = Infinity;
    else node.low = node.high = NaN;
  }
  yield;
  let end = ends;
  for (let i = order.length - 1; i >= 0; i -= 1) {
    const node = order[i], above = node.above;
    if (node.low !== node.low) node.x = 8 + pace * ((end -= 1) + 0.5);
    else node.x = (node.low + node.high) / 2;
    node.y = TREE_TOP_PX + rise * node.depth;
    if (!above) continue;
    above.low = Math.min(above.low, node.x);
    above.high = Math.max(above.high, node.x);
  }
  loose.forEach((node, i) => {
    node.x = 130 + (i % across) * 7;
    node.y = height - 7 * rows + Math.floor(i / across) * 7;
  });
  return { root, order, loose, width, height, rows };
}

function* drawTree() {
  const canvas = at("#tree canvas"), [width, height] = sizeOf(canvas);
  if (shape && shape.width === width && nodes.size > NAMED_MAX) {
    const pen = penOf(canvas);
    let drawn = 0;
    for (const node of changedNodes) {
      changedNodes.delete(node);
      drawNode(pen, node);
      if ((drawn += 1) % AT_ONCE === 0) yield;
    }
    return;
  }
  if (shape && shape.width === width && !changedNodes.size) return;
  const found = yield* layTree(width, height), [draft, reveal] = behind(canvas, width, height);
  changedNodes.clear();
  yield;
  draft.lineWidth = nodes.size > 1000 ? 0.5 : 1;
  for (const whole of [true, false]) {
    draft.strokeStyle = whole ? ink.edge : ink.accent;
    draft.beginPath();
    let drawn = 0;
    for (const node of found.order) {
      if (!node.above || (node.done === WHOLE) !== whole) continue;
      draft.moveTo(node.above.x, node.above.y);
      draft.lineTo(node.x, node.y);
      if ((drawn += 1) % AT_ONCE === 0) {
        draft.stroke();
        draft.beginPath();
        yield;
      }
    }
    draft.stroke();
    yield;
  }
  let drawn = 0;
  for (const node of nodes.values()) {
    drawNode(draft, node);
    if ((drawn += 1) % AT_ONCE === 0) yield;
  }
  draft.fillStyle = ink.text;
  draft.font = "600 12px system-ui, sans-serif";
  if (found.root.below.length) {
    draft.textAlign = "center";
    draft.fillText("origin", Math.max(20, Math.min(width - 20, found.root.x)), 10);
  }
  if (found.rows) {
    draft.textAlign = "left";
    draft.fillText("outside the tree", 0, height - 7 * found.rows + 4);
  }
  reveal();
  shape = found;
  canvas.setAttribute("aria-label", `tree of ${nodes.size} hosts`);
}

function drawNode(pen, node) {
  const host = hosts.get(node.number), size = nodes.size <= 100 ? 9 : nodes.size <= 1000 ? 5 : 3;
  pen.fillStyle = host && host.flags & AWAY ? ink.away : shade(node.done);
  pen.fillRect(node.x - size / 2, node.y - size / 2, size, size);
  if (nodes.size > NAMED_MAX || !host) return;
  const name = host.name.slice(0, 16), left = node.x > treeWidth() - 90;
  pen.fillStyle = ink.text;
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = left ? "right" : "left";
  pen.fillText(name, node.x + (left ? -size : size), node.y + 4);
}

const treeWidth = () => sizeOf(at("#tree canvas"))[0];

// -- pointing at things

function nearest(things, event, reach) {
  let found = null, best = reach * reach;
  for (const thing of things) {
    const across = thing.x - event.offsetX, down = thing.y - event.offsetY, far = across * across + down * down;
    if (far < best) [found, best] = [thing, far];
  }
  return found;
}

function tellHost(event) {
  const half = placed ? placed.size / 2 : 0;
  const host = nearest(hosts.values(), { offsetX: event.offsetX - half, offsetY: event.offsetY - half }, 12);
  const words = host && [host.name, host.zone && `zone ${host.zone}`, host.rack && `rack ${host.rack}`,
    host.flags & AWAY ? "away" : host.flags & RECEIVING ? `${host.done / 10} %` : "receives nothing",
    host.flags & SLOW ? "slow" : "", host.flags & BLAMED ? "blamed" : ""];
  setText(at("#hosts output"), words ? words.filter(Boolean).join(", ") : "");
}

function tellNode(event) {
  const node = nearest(nodes.values(), event, 12), name = (number) => (hosts.get(number) || { name: "?" }).name;
  const from = node && (node.parent === ORIGIN ? "the origin" : node.parent === NOBODY ? "nobody" : name(node.parent));
  setText(at("#tree output"), node ? `${name(node.number)}: ${node.done / 10} % of the stripe, from ${from}` : "");
}

function repaint() {
  readInk();
  placed = shape = steps = null;
  for (const node of nodes.values()) changedNodes.add(node);
  wake();
}

readInk();
at("#hosts canvas").addEventListener("mousemove", tellHost);
at("#tree canvas").addEventListener("mousemove", tellNode);
at("#tree select").addEventListener("change", (event) => choose(chosen, Number(event.target.value)));
at("#story input").addEventListener("input", filterStory);
at("#story ol").addEventListener("scroll", (event) => { scrolled = event.target.scrollTop > 4; });
new ResizeObserver(() => {
  const canvases = [...document.querySelectorAll("canvas")];
  if (canvases.every((canvas) => sizes.has(canvas) && sizes.get(canvas)[0] === canvas.clientWidth)) return;
  sizes.clear();
  repaint();
}).observe(at("main"));
document.addEventListener("visibilitychange", () => { if (!document.hidden) repaint(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
connect();
