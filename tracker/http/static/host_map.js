// The host map: a square for each host, by zone and rack. Where hosts are is found when one comes, goes or moves; otherwise only those
// that changed are drawn again.

import { dye, element, ink, nearest, ROWS_PER_STEP, setAttribute, setText, shade, Sheet, sizeOf } from "./canvas.js";
import { AWAY, BLAMED, changedHosts, DRAINED, hosts, layouts, naturalKey, RECEIVING, SLOW } from "./feed.js";

const LABEL_PX_MAX = 92;
const sheet = new Sheet(element("#hosts canvas"));
let placed = null; // {size, labels, height, width, layout}: where hosts are drawn; null before the first time and when colours change

export function forgetPlaces() {
  placed = null;
}

const shortened = (rack) => (rack.length > 14 ? `${rack.slice(0, 13)}…` : rack);
const ordered = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

// Racks of a zone are in columns that are all as wide as the largest rack.
function* placeHosts(width) {
  const size = hosts.size <= 60 ? 22 : hosts.size <= 200 ? 16 : hosts.size <= 1500 ? 9 : 5, step = size + (size > 5 ? 2 : 1);
  const zones = new Map(), labels = [], pen = sheet.hidden.getContext("2d", { willReadFrequently: true });
  let seen = 0;
  for (const host of hosts.values()) {
    let racks = zones.get(host.zone);
    if (!racks) zones.set(host.zone, (racks = new Map()));
    const members = racks.get(host.rack);
    if (members) members.push(host);
    else racks.set(host.rack, [host]);
    if ((seen += 1) % ROWS_PER_STEP === 0) yield;
  }
  const sorted = (names) => [...names].map((name) => [naturalKey(name), name])
    .sort((a, b) => ordered(a[0], b[0])).map(([, name]) => name);
  let y = 0, label = 0;
  pen.font = "10px system-ui, sans-serif";
  for (const racks of zones.values()) {
    for (const rack of racks.keys()) {
      if (rack) label = Math.max(label, Math.min(LABEL_PX_MAX, Math.ceil(pen.measureText(shortened(rack)).width) + 8));
    }
  }
  for (const zone of sorted(zones.keys())) {
    const racks = zones.get(zone);
    labels.push([0, y + 8, zone ? `zone ${zone}` : "no zone", true]);
    y += 20;
    let most = 0;
    for (const members of racks.values()) most = Math.max(most, members.length);
    const columns = Math.max(1, Math.min(most, Math.floor((width - label) / step))), wide = label + columns * step + 12;
    const across = Math.max(1, Math.floor((width + 12) / wide));
    let column = 0, tall = 0;
    for (const rack of sorted(racks.keys())) {
      const members = racks.get(rack);
      if (column === across) {
        column = 0;
        y += tall + 3;
        tall = 0;
      }
      const x = column * wide + label;
      if (rack) labels.push([x - 6, y + size / 2, shortened(rack), false]);
      members.sort((a, b) => ordered(a.key, b.key));
      for (let i = 0; i < members.length; i += 1) {
        members[i].x = x + (i % columns) * step;
        members[i].y = y + Math.floor(i / columns) * step;
      }
      tall = Math.max(tall, Math.ceil(members.length / columns) * step, 11);
      column += 1;
      if (column === across) yield;
    }
    y += tall + 10;
  }
  return { size, labels, height: Math.max(20, y), width };
}

// Draw what changed, in steps.
export function* drawHosts() {
  const canvas = element("#hosts canvas"), current = placed && placed.layout === layouts.hosts;
  if (current && !changedHosts.size && !sheet.unseen) return;
  let seen = 0;
  if (!current) {
    const layout = layouts.hosts, places = yield* placeHosts(sizeOf(canvas)[0]);
    changedHosts.clear();
    placed = null; // what is half drawn is no picture of these hosts, and not of those before either
    sheet.begin(places.width, places.height);
    for (const [x, y, text, strong] of places.labels) {
      sheet.write(text, x, y, strong ? { size: 12, bold: true } : { align: "right", colour: ink.faint });
      if ((seen += 20) % ROWS_PER_STEP === 0) yield;
    }
    for (const host of hosts.values()) {
      drawHost(host, places.size);
      if ((seen += 1) % ROWS_PER_STEP === 0) yield;
    }
    placed = { ...places, layout };
  } else {
    for (const host of changedHosts) {
      changedHosts.delete(host);
      drawHost(host, placed.size);
      if ((seen += 1) % ROWS_PER_STEP === 0) yield;
    }
  }
  sheet.show();
  setAttribute(canvas, "aria-label", `${hosts.size} hosts`);
}

function drawHost(host, size) {
  const { flags } = host, mark = flags & AWAY ? dye.away : flags & BLAMED ? dye.blamed : flags & SLOW ? dye.slow : flags & DRAINED ? dye.drained : 0;
  const colour = flags & AWAY ? 0 : flags & RECEIVING ? shade(host.done) : dye.idle;
  sheet.square(host.x, host.y, size, colour, mark || colour, size > 5 ? 2 : 1.5);
}

// The host at the pointer, null for none.
export function hostAt(event) {
  const half = placed ? placed.size / 2 : 0;
  return nearest(hosts.values(), event.offsetX - half, event.offsetY - half, 12);
}

export function describeHost(event) {
  const host = hostAt(event);
  const words = host && [host.name, host.zone && `zone ${host.zone}`, host.rack && `rack ${host.rack}`,
    host.flags & AWAY ? "away" : host.flags & RECEIVING ? `${host.done / 10} %` : "receives nothing",
    host.flags & SLOW ? "slow" : "", host.flags & BLAMED ? "blamed" : "", host.flags & DRAINED ? "drained" : ""];
  setText(element("#hosts output"), words ? words.filter(Boolean).join(", ") : "");
}
