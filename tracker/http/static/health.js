"use strict";
// Draws what /v1/events tells (tracker/core/view.py): everything at first, then what changed. Names come from the network, so they
// are only ever set as text. Hosts and trees are drawn on canvases: thousands of them are repainted within a frame or two.

const AWAY = 1, RECEIVING = 2, SLOW = 4, BLAMED = 8;
const ORIGIN = -1, NOBODY = -2, ABSENT = -1;
const STORY_LINES_MAX = 300, RETRY_MS = 3000, LABEL_PX = 92;
const RAMP = ramp(["#00224e", "#3b496c", "#7c7b78", "#bcae6c", "#fee838"], 101);

const hosts = new Map(); // number -> {number, name, zone, rack, done, flags, x, y}
const nodes = new Map(); // number -> {number, done, parent, x, y}: the tree that is watched
let swarms = [], chosen = null, stripe = 0, source = null, placed = null, shape = null;
let scrolled = false;
const sizes = new Map(); // canvas -> [width, height], so that painting need not wait for a layout
const byName = new Intl.Collator(undefined, { numeric: true }).compare;
const measured = { updates: 0, last_ms: 0, max_ms: 0, all_ms: [] };
window.swarmHealth = { measured, hosts, nodes };

const at = (path) => document.querySelector(path);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let ink = {};

function readInk() {
  ink = { text: style("--ink"), faint: style("--faint"), line: style("--line"), sheet: style("--sheet"),
    away: style("--away"), slow: style("--slow"), blamed: style("--blamed"), accent: style("--accent") };
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
    const began = performance.now();
    apply(JSON.parse(event.data));
    note(performance.now() - began);
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

function note(took) {
  measured.updates += 1;
  measured.last_ms = took;
  measured.max_ms = Math.max(measured.max_ms, took);
  measured.all_ms.push(took);
  if (measured.all_ms.length > 1000) measured.all_ms.shift();
}

function tellConnection(text, lost) {
  at("#connection").textContent = text;
  at("#connection").classList.toggle("lost", lost);
}

function apply(change) {
  if (change.whole) {
    hosts.clear();
    nodes.clear();
    placed = shape = null;
    at("#story ol").replaceChildren();
  }
  for (const [number, name, zone, rack] of change.hosts) {
    hosts.set(number, Object.assign(hosts.get(number) || { number, done: 1000, flags: 0 }, { name, zone, rack }));
    placed = null;
  }
  for (const number of change.forgotten) {
    if (hosts.delete(number)) placed = null;
  }
  const changed = [];
  for (const [number, done, flags] of change.states) {
    const host = hosts.get(number);
    if (host) changed.push(Object.assign(host, { done, flags }));
  }
  for (const [number, done, parent] of change.tree) {
    const node = nodes.get(number);
    if (done === ABSENT) {
      if (nodes.delete(number)) shape = null;
    } else if (!node) {
      nodes.set(number, { number, done, parent, x: 0, y: 0 });
      shape = null;
    } else {
      if (node.parent !== parent) shape = null;
      node.done = done;
      node.parent = parent;
    }
  }
  showTotals(change.totals);
  showSwarms(change.swarms);
  showTroubled(change.troubled);
  showStory(change.story);
  if (!document.hidden) {
    drawHosts(changed);
    drawTree();
  }
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

function showStory(rows) {
  if (!rows.length) return;
  const list = at("#story ol"), lines = document.createDocumentFragment();
  for (const row of rows.slice(-STORY_LINES_MAX).reverse()) {
    const line = make("li"), when = new Date(Date.now() - row.age_s * 1000);
    const time = make("time", when.toTimeString().slice(0, 8));
    time.dateTime = when.toISOString();
    line.append(time, row.swarm ? `${short(row.swarm).slice(0, 6)}: ${row.event}` : row.event);
    lines.append(line);
  }
  const height = scrolled ? list.scrollHeight : 0;
  list.prepend(lines);
  while (list.children.length > STORY_LINES_MAX) list.lastChild.remove();
  filterStory();
  if (scrolled) list.scrollTop += list.scrollHeight - height; // who reads further down is not moved
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

function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1, [width, shown] = sizeOf(canvas);
  if (height !== null && canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`;
  const tall = height === null ? shown : height;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(tall * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(tall * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return [pen, width, tall];
}

const shade = (done) => RAMP[Math.floor(done / 10)];

function placeHosts() {
  const size = hosts.size <= 200 ? 16 : hosts.size <= 1500 ? 10 : 6, step = size + 2;
  const [width] = sizeOf(at("#hosts canvas")), zones = new Map(), labels = [];
  for (const host of hosts.values()) {
    if (!zones.has(host.zone)) zones.set(host.zone, new Map());
    const racks = zones.get(host.zone);
    if (!racks.has(host.rack)) racks.set(host.rack, []);
    racks.get(host.rack).push(host);
  }
  const named = (a, b) => byName(a[0], b[0]);
  let y = 0;
  for (const [zone, racks] of [...zones].sort(named)) {
    labels.push([0, y + 12, zone ? `zone ${zone}` : "no zone", true]);
    y += 18;
    let x = 0, tall = 0;
    for (const [rack, members] of [...racks].sort(named)) {
      const label = rack ? LABEL_PX : 0, room = Math.max(1, Math.floor((width - label) / step));
      const columns = Math.min(members.length, room), wide = label + columns * step + 8;
      if (x && x + wide > width) {
        x = 0;
        y += tall + 4;
        tall = 0;
      }
      if (rack) {
        const text = rack.length > 14 ? `${rack.slice(0, 13)}…` : rack;
        labels.push([x + label - 6, y + Math.max(9, size - 3), text, false]);
      }
      members.sort((a, b) => byName(a.name, b.name));
      members.forEach((host, i) => {
        host.x = x + label + (i % columns) * step;
        host.y = y + Math.floor(i / columns) * step;
      });
      tall = Math.max(tall, Math.ceil(members.length / columns) * step, 12);
      x += wide;
    }
    y += tall + 8;
  }
  return { size, labels, height: Math.max(20, y), width };
}

function drawHosts(changed) {
  const canvas = at("#hosts canvas"), anew = !placed;
  if (anew) placed = placeHosts();
  const [pen] = prepare(canvas, placed.height);
  if (anew) {
    pen.clearRect(0, 0, placed.width, placed.height);
    for (const [x, y, text, strong] of placed.labels) {
      pen.font = `${strong ? "600 12" : "10"}px system-ui, sans-serif`;
      pen.fillStyle = strong ? ink.text : ink.faint;
      pen.textAlign = strong ? "left" : "right";
      pen.fillText(text, x, y);
    }
  }
  for (const host of anew ? hosts.values() : changed) drawHost(pen, host, placed.size);
  const away = [...hosts.values()].filter((host) => host.flags & AWAY).length;
  canvas.setAttribute("aria-label", `${hosts.size} hosts, ${away} of them away`);
}

function drawHost(pen, host, size) {
  pen.clearRect(host.x - 1, host.y - 1, size + 2, size + 2);
  const mark = host.flags & AWAY ? ink.away : host.flags & BLAMED ? ink.blamed : host.flags & SLOW ? ink.slow : null;
  if (host.flags & AWAY) {
    pen.strokeStyle = mark;
    pen.lineWidth = 2;
    pen.strokeRect(host.x + 1, host.y + 1, size - 2, size - 2);
    return;
  }
  pen.fillStyle = shade(host.done);
  pen.fillRect(host.x, host.y, size, size);
  if (mark) {
    pen.strokeStyle = mark;
    pen.lineWidth = 2;
    pen.strokeRect(host.x + 0.5, host.y + 0.5, size - 1, size - 1);
  }
}

// Parents of hosts that have everything are those of before, and may form circles with those of now: what no root reaches is hung up at
// one of its hosts that has everything.
function shapeTree() {
  const children = new Map([[ORIGIN, []]]), order = [], depths = new Map(), tops = [];
  for (const node of nodes.values()) {
    if (node.parent === NOBODY || (node.parent !== ORIGIN && !nodes.has(node.parent))) tops.push(node.number);
    else if (children.has(node.parent)) children.get(node.parent).push(node.number);
    else children.set(node.parent, [node.number]);
  }
  const cut = new Set();
  const visit = (top, depth) => {
    const open = [[top, depth]];
    while (open.length) {
      const [number, level] = open.pop();
      if (depths.has(number)) continue;
      depths.set(number, level);
      order.push(number);
      for (const child of (children.get(number) || []).slice().reverse()) open.push([child, level + 1]);
    }
  };
  visit(ORIGIN, 0);
  const loose = new Set();
  for (const top of tops) {
    if (children.has(top)) visit(top, 0);
    else loose.add(top);
  }
  for (const done of [true, false]) {
    for (const node of nodes.values()) {
      if (!depths.has(node.number) && !loose.has(node.number) && (node.done === 1000) === done) {
        cut.add(node.number);
        visit(node.number, 0);
      }
    }
  }
  return { children, order, depths, cut, loose };
}

function layTree(width, height) {
  shape = Object.assign(shapeTree(), { width, height, places: new Map() });
  const deepest = Math.max(1, ...shape.depths.values()), places = shape.places;
  const below = shape.loose.size ? 26 : 0, rise = (height - 30 - below) / deepest;
  const ends = shape.order.filter((number) => !(shape.children.get(number) || []).some((child) => onward(number, child)));
  const pace = (width - 16) / Math.max(1, ends.length);
  ends.forEach((number, i) => places.set(number, 8 + pace * (i + 0.5)));
  for (let i = shape.order.length - 1; i >= 0; i -= 1) {
    const number = shape.order[i];
    if (places.has(number)) continue;
    const under = (shape.children.get(number) || []).filter((child) => onward(number, child)).map((child) => places.get(child));
    places.set(number, (Math.min(...under) + Math.max(...under)) / 2);
  }
  for (const number of shape.order) {
    const node = nodes.get(number);
    if (node) [node.x, node.y] = [places.get(number), 14 + rise * shape.depths.get(number)];
  }
  const across = Math.max(1, Math.floor((width - 90) / 7));
  [...shape.loose].forEach((number, i) => {
    const node = nodes.get(number);
    [node.x, node.y] = [90 + (i % across) * 7, height - 14 + Math.floor(i / across) * 7];
  });
}

const onward = (parent, child) => !shape.cut.has(child) && shape.depths.get(child) === shape.depths.get(parent) + 1;

function drawTree() {
  const canvas = at("#tree canvas"), [pen, width, height] = prepare(canvas, null);
  pen.clearRect(0, 0, width, height);
  if (!nodes.size) return;
  if (!shape || shape.width !== width) layTree(width, height);
  const top = shape.places.get(ORIGIN);
  const rooted = (shape.children.get(ORIGIN) || []).length > 0;
  for (const finished of [true, false]) {
    pen.beginPath();
    for (const node of nodes.values()) {
      if ((node.done === 1000) !== finished || shape.cut.has(node.number) || shape.loose.has(node.number)) continue;
      const above = node.parent === ORIGIN ? { x: top, y: 14 } : nodes.get(node.parent);
      if (!above || node.parent === NOBODY) continue;
      pen.moveTo(above.x, above.y);
      pen.lineTo(node.x, node.y);
    }
    pen.strokeStyle = finished ? ink.line : ink.accent;
    pen.lineWidth = nodes.size > 1000 ? 0.5 : 1;
    pen.stroke();
  }
  const size = nodes.size <= 100 ? 9 : nodes.size <= 1000 ? 5 : 3;
  for (const node of nodes.values()) {
    const host = hosts.get(node.number);
    pen.fillStyle = host && host.flags & AWAY ? ink.away : shade(node.done);
    pen.fillRect(node.x - size / 2, node.y - size / 2, size, size);
    if (nodes.size <= 40 && host) {
      pen.fillStyle = ink.text;
      pen.font = "11px system-ui, sans-serif";
      pen.fillText(host.name.slice(0, 16), node.x + size, node.y + 4);
    }
  }
  pen.fillStyle = ink.text;
  pen.font = "600 12px system-ui, sans-serif";
  if (rooted) pen.fillText("origin", top - 18, 10);
  if (shape.loose.size) pen.fillText("outside the tree", 0, height - 10);
  canvas.setAttribute("aria-label", `tree of ${nodes.size} hosts`);
}

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
  placed = shape = null;
  drawHosts([]);
  drawTree();
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
