// What the page shows as text: totals, swarms, hosts in trouble, preseeds, the story. Names come from the network, so they are only ever
// set as text.

import { element, ROWS_PER_STEP, setText } from "./canvas.js";
import { hosts, select, selection, STORY_LINES_MAX } from "./feed.js";

const STORY_LINES_PER_STEP = ROWS_PER_STEP / 5;
let scrolled = false; // the reader has moved down in the story

export function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(count) < 1024 || unit === "TiB") return `${unit === "B" ? Math.round(count) : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
}

export function seconds(count) {
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

// Let a table's body have `count` lines, the last of them made or removed.
function resize(body, count, line) {
  while (body.children.length > count) body.lastChild.remove();
  while (body.children.length < count) body.append(line());
}

export function showConnection(text, lost) {
  element("#connection").textContent = text;
  element("#connection").classList.toggle("lost", lost);
}

export function showTotals(totals) {
  const shown = {
    hosts: totals.hosts, receiving: totals.receiving, away: totals.away, slow: totals.slow, blamed: totals.blamed,
    swarms: `${totals.swarms}, ${totals.running} running${totals.stalled ? `, ${totals.stalled} stalled` : ""}`,
    "origin leases": totals.origin_leases, delivered: `${bytes(totals.rate_bytes_s)}/s`,
  };
  const list = element("#totals");
  if (!list.children.length) {
    for (const name of Object.keys(shown)) {
      const pair = make("div");
      pair.append(make("dt", name), make("dd"));
      list.append(pair);
    }
  }
  Object.values(shown).forEach((value, i) => setText(list.children[i].lastChild, String(value)));
}

// Trackers whose hosts and swarms are not on the page.
export function showSilent(rows) {
  const list = element("#silent");
  resize(list, rows.length, () => make("li"));
  rows.forEach(([tracker, why], i) => setText(list.children[i], `without the tracker ${tracker}: ${why}`));
}

export function showSwarms(rows) {
  const body = element("#swarms tbody");
  resize(body, rows.length, swarmLine);
  rows.forEach((row, i) => fillSwarm(body.children[i], row));
  if (!selection.swarm && rows.length) select(rows[0].digest, 0);
  const selected = rows.find((row) => row.digest === selection.swarm);
  if (selected) showStripes(selected);
}

function swarmLine() {
  const line = make("tr");
  for (let i = 0; i < 7; i += 1) line.append(make("td"));
  const button = make("button");
  button.append(make("code"));
  line.children[0].append(button, " ", make("span"));
  line.children[3].append(make("progress"), " ", make("span"));
  line.addEventListener("click", () => select(line.dataset.digest, 0));
  return line;
}

function fillSwarm(line, row) {
  const cells = line.children, share = row.bytes_wanted ? row.bytes_held / row.bytes_wanted : 1;
  line.dataset.digest = row.digest;
  line.title = row.title ? `${row.title} ${row.digest}` : row.digest;
  line.classList.toggle("chosen", row.digest === selection.swarm);
  setText(cells[0].firstChild.firstChild, short(row.digest));
  setText(cells[0].lastChild, `${row.title ? `${row.title}, ` : ""}${bytes(row.size)}${row.priority === "preseed" && row.state !== "seeded" ? ", preseed" : ""}`);
  setText(cells[1], row.state);
  cells[1].className = `state-${row.state}`;
  setText(cells[2], `${row.complete} of ${row.hosts}`);
  cells[3].firstChild.value = share;
  setText(cells[3].lastChild, `${(Math.floor(share * 1000) / 10).toFixed(1)} %`);
  setText(cells[4], row.state === "seeded" ? "" : `${bytes(row.rate_bytes_s)}/s`);
  setText(cells[5], row.state === "seeded" ? "" : row.eta_s === null ? "unknown" : seconds(row.eta_s));
  setText(cells[6], String(row.origin_leases));
}

function showStripes(row) {
  const menu = element("#tree select");
  while (menu.options.length > row.stripes) menu.lastChild.remove();
  while (menu.options.length < row.stripes) menu.append(make("option", String(menu.options.length)));
  if (menu.value !== String(selection.stripe)) menu.value = String(selection.stripe);
  setText(element("#tree .of"), `of ${short(row.digest)}`);
}

export function showTroubled(rows) {
  const body = element("#troubled tbody");
  resize(body, rows.length, () => {
    const line = make("tr");
    line.append(make("td"), make("td", undefined, "why"));
    return line;
  });
  rows.forEach(([number, why], i) => {
    const host = hosts.get(number);
    setText(body.children[i].firstChild, host ? host.name : "");
    setText(body.children[i].lastChild, why);
  });
}

export function showPreseeds(rows) {
  element("#preseeds tbody").replaceChildren(...rows.reverse().map((row) => {
    const line = make("tr");
    line.append(make("td", row.package), make("td", row.state, `state-${row.state}`));
    line.append(make("td", `${row.hosts_done} of ${row.hosts_total} hosts`), make("td", row.id));
    return line;
  }));
}

// Add lines to the story, the newest on top, in steps. `clear`: the lines of before are of another connection.
export function* showStory(rows, clear) {
  const list = element("#story ol");
  if (clear) list.replaceChildren();
  for (let from = 0; from < rows.length; from += STORY_LINES_PER_STEP) {
    const lines = document.createDocumentFragment();
    for (const row of rows.slice(from, from + STORY_LINES_PER_STEP).reverse()) {
      const line = make("li"), when = new Date(Date.now() - row.age_s * 1000);
      const time = make("time", when.toTimeString().slice(0, 8));
      time.dateTime = when.toISOString();
      line.append(time, row.swarm ? `${short(row.swarm).slice(0, 6)}: ${row.event}` : row.event);
      lines.append(line);
    }
    const height = scrolled ? list.scrollHeight : 0;
    list.prepend(lines);
    while (list.children.length > STORY_LINES_MAX) list.lastChild.remove();
    if (scrolled) list.scrollTop += list.scrollHeight - height; // the lines being read do not move
    yield;
  }
  if (rows.length) filterStory();
}

export function filterStory() {
  const filter = element("#story input").value.toLowerCase();
  if (!filter && !element("#story li[hidden]")) return;
  for (const line of element("#story ol").children) line.hidden = !line.textContent.toLowerCase().includes(filter);
}

export function noteScroll(event) {
  scrolled = event.target.scrollTop > 4;
}
