// Packages: a row for each, with its blobs folded below. A blob of no known package is a row of its own.

import { ask } from "./api.js";
import { element, make, setAttribute, setText } from "./canvas.js";
import { select, selection } from "./feed.js";
import { orderButton } from "./orders.js";
import { suggestPreseed } from "./preseeds.js";
import { bytes, seconds, several, short } from "./words.js";

const SAMPLES_MAX = 60; // rates of a row that its line shows, one a report
const WAITING_SHOWN_MAX = 12;
const STATES = ["stalled", "running", "seeded"]; // the worst first
const TURNS = 8; // a row that is out of sight is filled with every so many reports
const NEAR_PX = 200; // so far beyond the edge of the table a row counts as in sight
const shown = new Map(); // key -> {body, rates, open, waiting, found, near, filled}; near: it is in sight; filled: what it says
let reports = 0, moved = true; // rows are perhaps elsewhere than they were when it was seen which are in sight
element("#packages .scroll").addEventListener("scroll", () => {
  look();
  for (const line of shown.values()) if (line.near && line.filled !== line.found) fillPackage(line);
}, { passive: true });

// Find which rows are in sight.
function look() {
  const { scrollTop, clientHeight } = element("#packages .scroll");
  moved = false;
  for (const line of shown.values()) {
    const { offsetTop, offsetHeight } = line.body;
    line.near = offsetTop + offsetHeight > scrollTop - NEAR_PX && offsetTop < scrollTop + clientHeight + NEAR_PX;
  }
}

// The table has another width, and its rows perhaps other heights.
export function packagesMoved() {
  moved = true;
}

// Rows of swarms joined by package: {key, name, state, size, hosts, complete, held, wanted, rate, origin, eta, blobs}.
export function packagesOf(rows) {
  const packages = new Map();
  for (const row of rows) {
    const key = row.manifest || row.digest;
    let found = packages.get(key);
    if (!found) {
      found = { key, name: row.package || short(row.digest), manifest: row.manifest, reference: referenceOf(row), state: "seeded", size: 0, hosts: 0, complete: Infinity, held: 0, wanted: 0,
        rate: 0, origin: null, eta: 0, preseed: false, waits: "", blobs: [] };
      packages.set(key, found);
    }
    found.blobs.push(row);
    found.size += row.size;
    found.hosts = Math.max(found.hosts, row.hosts);
    found.complete = Math.min(found.complete, row.complete);
    found.held += row.bytes_held;
    found.wanted += row.bytes_wanted;
    found.rate += row.rate_bytes_s;
    if (row.origin_bytes !== null) found.origin = (found.origin || 0) + row.origin_bytes;
    if (STATES.indexOf(row.state) < STATES.indexOf(found.state)) found.state = row.state;
    found.waits = found.waits || row.waits;
    if (row.state !== "seeded") {
      found.eta = row.eta_s === null || found.eta === null ? null : Math.max(found.eta, row.eta_s);
      found.preseed = found.preseed || row.priority === "preseed";
    }
  }
  const list = [...packages.values()];
  list.forEach((found) => found.blobs.sort((a, b) => b.size - a.size));
  return list.sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state) || (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
}

// How commands name a package: by its tag, or by the digest of its manifest.
function referenceOf(row) {
  const [name, digits] = row.package.split("@");
  return digits && row.manifest ? `${name}@${row.manifest}` : row.package;
}

export function showPackages(packages) {
  const table = element("#packages table"), keys = new Set(packages.map((found) => found.key));
  if (moved) look();
  for (const [key, line] of shown) {
    if (keys.has(key)) continue;
    moved = true;
    line.body.remove();
    shown.delete(key);
  }
  let before = table.tHead, turn = (reports += 1);
  for (const found of packages) {
    if (!shown.has(found.key)) addPackage(found);
    const line = shown.get(found.key);
    if (before.nextElementSibling !== line.body) {
      before.after(line.body);
      moved = true;
    }
    before = line.body;
    line.found = found;
    line.rates.push(found.rate);
    if (line.rates.length > SAMPLES_MAX) line.rates.shift();
    turn += 1;
    if (line.near || line.open || !line.filled || line.filled.state !== found.state || turn % TURNS === 0) fillPackage(line);
  }
  if (!selection.swarm && packages.length) select(packages[0].blobs[0].digest, 0);
  for (const found of packages) {
    const row = found.blobs.find((blob) => blob.digest === selection.swarm);
    if (row) showStripes(row, found);
  }
}

function addPackage(found) {
  const line = { body: makeBody(found.key), rates: [], open: false, waiting: null, found, near: false, filled: null };
  shown.set(found.key, line);
}

function makeBody(key) {
  const body = make("tbody"), line = make("tr");
  for (let i = 0; i < 7; i += 1) line.append(make(i ? "td" : "th"));
  line.children[0].scope = "row";
  const button = make("button", undefined, "fold");
  button.append(make("span"), " ", make("small"));
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => { location.hash = shown.get(key).open ? "" : `package=${short(key)}`; });
  line.children[0].append(button);
  line.children[3].append(makeBar(), " ", make("span"));
  const plot = element("#sparkline").content.firstElementChild.cloneNode(true);
  line.children[4].append(plot, " ", make("span"));
  body.append(line);
  return body;
}

function makeBar() {
  const bar = make("progress");
  bar.setAttribute("aria-label", "progress");
  bar.value = 0; // without a value it would seem to move
  return bar;
}

const percent = (share) => `${(Math.floor(share * 1000) / 10).toFixed(1)} %`;

// Have a row say what was reported last of its package.
function fillPackage(line) {
  const found = line.filled = line.found;
  const cells = line.body.firstChild.children, share = found.wanted ? found.held / found.wanted : 1, rests = found.state === "seeded";
  line.body.classList.toggle("chosen", found.blobs.some((row) => row.digest === selection.swarm));
  setAttribute(line.body, "title", found.key);
  setText(cells[0].firstChild.firstChild, found.name);
  setText(cells[0].firstChild.lastChild, `${bytes(found.size)}${found.preseed ? ", preseed" : ""}${found.waits ? `; ${found.waits}` : ""}`);
  setText(cells[1], found.state);
  setAttribute(cells[1], "class", `state-${found.state}`);
  setText(cells[2], `${found.complete} of ${found.hosts}`);
  if (cells[3].firstChild.value !== share) cells[3].firstChild.value = share;
  setText(cells[3].lastChild, percent(share));
  const most = Math.max(...line.rates), plot = cells[4].firstChild;
  plot.classList.toggle("flat", !most);
  if (most) {
    plot.firstChild.setAttribute("points", line.rates.map((rate, i) => `${i},${(15 - (14 * rate) / most).toFixed(1)}`).join(" "));
  }
  setText(cells[4].lastChild, rests ? "" : `${bytes(found.rate)}/s`);
  setText(cells[5], found.origin === null || !found.size ? "" : `${(found.origin / found.size).toFixed(2)} copies`);
  setText(cells[6], rests ? "" : found.eta === null ? "unknown" : seconds(found.eta));
  fillBlobs(line, found);
}

// The blobs of a package that is unfolded, and the hosts that wait for the one whose tree is shown.
function fillBlobs(line, found) {
  const count = line.open ? found.blobs.length + 1 : 0;
  while (line.body.children.length > count + 1) line.body.lastChild.remove();
  while (line.body.children.length < count + 1) line.body.append(makeBlob());
  if (!line.open) return;
  found.blobs.forEach((row, i) => {
    const cells = line.body.children[i + 1].children, button = cells[0].firstChild;
    line.body.children[i + 1].className = "blob";
    if (!button) return;
    button.dataset.digest = row.digest;
    button.setAttribute("aria-pressed", String(row.digest === selection.swarm));
    setText(button.firstChild, short(row.digest));
    setText(cells[0].lastChild, bytes(row.size));
    setText(cells[1], row.state);
    setText(cells[2], `${row.complete} of ${row.hosts}`);
    setText(cells[3], percent(row.bytes_wanted ? row.bytes_held / row.bytes_wanted : 1));
    setText(cells[4], row.state === "seeded" ? "" : `${bytes(row.rate_bytes_s)}/s`);
    setText(cells[5], row.origin_bytes === null ? "" : bytes(row.origin_bytes));
  });
  const last = line.body.lastChild;
  last.className = "waiting";
  if (last.children.length > 1) {
    const cell = make("td");
    cell.colSpan = 7;
    cell.append(make("p"), ...(found.manifest ? [ordersFor(found)] : []));
    last.replaceChildren(cell);
  }
  const row = found.blobs.find((blob) => blob.digest === selection.swarm && blob.state !== "seeded") ||
    found.blobs.find((blob) => blob.state !== "seeded");
  const waiting = last.firstChild.firstChild;
  if (!row) setText(waiting, "No host waits for it.");
  else askWaiting(line, row.digest, waiting);
}

// What can be done with a package: preseed it, and evict it from all hosts.
function ordersFor(found) {
  const line = make("div"), says = make("output", undefined, "says"), preseed = make("button", "Preseed …", "act");
  preseed.type = "button";
  preseed.addEventListener("click", () => suggestPreseed(found.reference));
  line.append(preseed, " ", evictButton("Evict everywhere", found, { everywhere: true }, "every host", says), says);
  return line;
}

// A button that evicts a package. `where` is in words for the question.
export function evictButton(text, found, hosts, where, says) {
  return orderButton(text, "hosts", `Remove ${found.name} from ${where}?`, says,
    () => ask("v1/evictions", "POST", { package: found.reference, digest: found.manifest, ...hosts }).then((done) => {
      const parts = [`${found.name} is gone from ${several(done.evicted, "one host", "hosts")}, ${bytes(done.bytes_freed)} freed`];
      if (done.stayed) parts.push(`it stays on ${several(done.stayed, "one host", "hosts")} (${done.stayed_hosts[0].host}: ${done.stayed_hosts[0].reason})`);
      if (done.silent) parts.push(`${several(done.silent, "one host has", "hosts have")} not answered`);
      if (done.unanswered.length) parts.push(`no answer from the tracker ${done.unanswered.join(", ")}`);
      return `${parts.join("; ")}.`;
    }));
}

// The packages among those that are shown of which a host has a part, by the digests of its blobs.
export function packagesWith(digests) {
  const held = new Set(digests);
  return [...shown.values()].map((line) => line.found).filter((found) => found.blobs.some((row) => held.has(row.digest)));
}

function makeBlob() {
  const line = make("tr");
  for (let i = 0; i < 7; i += 1) line.append(make("td"));
  const button = make("button");
  button.append(make("code"));
  button.title = "show its tree";
  button.addEventListener("click", () => select(button.dataset.digest, 0));
  line.children[0].append(button, " ", make("small"));
  return line;
}

// Name the hosts that have the least of a blob. The tracker is asked again when it has answered and two seconds have passed.
function askWaiting(line, digest, cell) {
  if (line.waiting) return;
  line.waiting = setTimeout(() => { line.waiting = null; }, 2000);
  ask(`v1/swarms/${digest}`).then((swarm) => {
    const late = swarm.members.map((member) => [member.host, member.counts.reduce((sum, count) => sum + count, 0)])
      .filter(([, count]) => count < swarm.pieces).sort((a, b) => a[1] - b[1]);
    const names = late.slice(0, WAITING_SHOWN_MAX).map(([host, count]) => `${host} (${Math.floor((100 * count) / swarm.pieces)} %)`);
    const more = late.length > names.length ? ` and ${late.length - names.length} more` : "";
    if (!late.length) return setText(cell, "No host waits for it.");
    const words = [`Wait for ${short(digest)}: `];
    names.forEach((text, i) => {
      const link = make("a", text);
      link.href = `#host=${encodeURIComponent(late[i][0])}`;
      words.push(...(i ? [", "] : []), link);
    });
    return cell.replaceChildren(...words, more);
  }, (problem) => setText(cell, problem.message));
}

// Unfold the package whose digest begins like this, and fold all others.
export function unfold(prefix) {
  moved = true;
  for (const [key, line] of shown) {
    line.open = Boolean(prefix) && short(key) === prefix;
    const button = line.body.firstChild.firstChild.firstChild;
    button.setAttribute("aria-expanded", String(line.open));
    if (!line.open) while (line.body.children.length > 1) line.body.lastChild.remove();
  }
}

// Whether there is a package whose digest begins like this.
export const isShown = (prefix) => [...shown.keys()].some((key) => short(key) === prefix);

function showStripes(row, found) {
  const menu = element("#tree select");
  while (menu.options.length > row.stripes) menu.lastChild.remove();
  while (menu.options.length < row.stripes) menu.append(make("option", String(menu.options.length)));
  if (menu.value !== String(selection.stripe)) menu.value = String(selection.stripe);
  setText(element("#tree .of"), `of ${found.name === short(row.digest) ? "" : `${found.name}, `}${short(row.digest)}`);
}
