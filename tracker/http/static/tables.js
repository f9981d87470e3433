// What the page shows as text: totals, hosts in trouble, the story. Names come from the network, so they are only ever
// set as text.

import { element, make, setAttribute, setText } from "./canvas.js";
import { hosts, STORY_LINES_MAX } from "./feed.js";
import { judge } from "./verdict.js";
import { bytes, short } from "./words.js";

const STORY_LINES_PER_STEP = 50;
let scrolled = false; // the reader has moved down in the story
let filtered = false; // some lines of the story may be hidden

// Let a table's body have `count` lines, the last of them made or removed.
function resize(body, count, line) {
  while (body.children.length > count) body.lastChild.remove();
  while (body.children.length < count) body.append(line());
}

export function showConnection(text, lost) {
  element("#connection").textContent = text;
  element("#connection").classList.toggle("lost", lost);
  judge("connection", lost ? [[`${text}; what stands below is what was reported last`, ""]] : []);
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

export function showTroubled(rows) {
  const body = element("#troubled tbody");
  resize(body, rows.length, () => {
    const line = make("tr");
    line.append(make("td"), make("td", undefined, "why"));
    line.firstChild.append(make("a"));
    return line;
  });
  rows.forEach(([number, why], i) => {
    const host = hosts.get(number);
    const link = body.children[i].firstChild.firstChild, name = host ? host.name : "";
    setText(link, name);
    setAttribute(link, "href", `#host=${encodeURIComponent(name)}`);
    setText(body.children[i].lastChild, why);
  });
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
  if (!filter && !filtered) return;
  filtered = Boolean(filter);
  for (const line of element("#story ol").children) line.hidden = !line.textContent.toLowerCase().includes(filter);
}

export function noteScroll(event) {
  scrolled = event.target.scrollTop > 4;
}
