// The feed: what the tracker reports at /v1/events (tracker/core/views/fleet_view.py), everything at first, then what changed.
//
// Hosts and the nodes of the watched tree are as the last report left them, at once; which of them changed since they were drawn is noted
// beside them. The parts of a report that are shown as text wait in `pending` until a frame takes them.

import { askForToken, credentials } from "./credential.js";

export const AWAY = 1, RECEIVING = 2, SLOW = 4, BLAMED = 8, DRAINED = 32; // flags of a host
export const ORIGIN = -1, NO_PARENT = -2; // in place of a parent's number
export const ABSENT = -1, WHOLE = 1000; // progress is in thousandths; ABSENT: the host has left the swarm
export const STORY_LINES_MAX = 300;
const RETRY_MS = 3000;
const SILENCE_MS = 10_000; // a tracker reports every second; one that hangs, or is cut off, ends no connection

export const hosts = new Map(); // number -> {number, name, key, zone, rack, done, flags, x, y}; key: the name, to sort by
export const nodes = new Map(); // number -> {number, done, parent, x, y, above, depth, low, high, below, loose, seen}
export const changedHosts = new Set(), changedNodes = new Set(); // reported since they were drawn
export const layouts = { hosts: 0, tree: 0 }; // counts the reports after which everything is to be laid out anew
export const selection = { swarm: null, stripe: 0 }; // whose tree is watched
let pending = null; // {clear, totals, silent, swarms, troubled, story}; of two reports the later one counts, their stories are joined
let source = null, listener = null;

// Begin to listen. `hears` has report(apply), which is to call apply(), preseeds(rows) and connection(text, lost).
export function listen(hears) {
  listener = hears;
  connect();
}

// Watch the tree of another stripe.
export function select(swarm, stripe) {
  if (swarm === selection.swarm && stripe === selection.stripe) return;
  Object.assign(selection, { swarm, stripe });
  connect();
}

// What was reported and is not shown yet, if anything; the caller shows it.
export function takePending() {
  const taken = pending;
  pending = null;
  return taken;
}

export const hasPending = () => pending !== null;

// A key that orders names as people expect: h2 before h10.
export const naturalKey = (name) => name.replace(/\d+/g, (digits) => digits.padStart(12, "0"));

function connect() {
  if (source) source.abort();
  const { swarm, stripe } = selection;
  const query = swarm ? `?swarm=${encodeURIComponent(swarm)}&stripe=${stripe}` : "";
  const opened = source = new AbortController();
  read(`v1/events${query}`, opened).catch(() => null).then((problem) => {
    if (source !== opened) return;
    if (problem && (problem.status === 401 || problem.status === 403)) {
      listener.connection("a token is needed", true);
      askForToken(problem, () => { if (source === opened) connect(); });
      return;
    }
    listener.connection(problem && problem.detail || "no answer from the tracker, trying again", true);
    selection.swarm = null; // the swarm may be no more
    setTimeout(() => { if (source === opened) connect(); }, RETRY_MS);
  });
}

// Take in events (server-sent events of the HTML standard, 9.2) until they end; returns the problem document of a tracker that sends none.
// Not EventSource, which can show no token. Rejects after a silence.
async function read(url, opened) {
  let silence = 0;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => opened.abort(), SILENCE_MS);
  };
  heard();
  try {
    return await readHeard(url, opened.signal, heard);
  } finally {
    clearTimeout(silence);
  }
}

async function readHeard(url, signal, heard) {
  const response = await fetch(url, { headers: credentials(), signal, cache: "no-store", redirect: "error" });
  if (!response.ok) return { status: response.status, ...await response.json() };
  listener.connection("live", false);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return null;
    heard();
    parts.push(value);
    if (!value.includes("\n\n") && !(value.startsWith("\n") && parts.length > 1)) continue;
    const blocks = parts.join("").split("\n\n");
    parts = [blocks.pop()];
    blocks.forEach(deliver);
  }
}

// One event: its name and its data are a line each.
function deliver(block) {
  const fields = Object.fromEntries(block.split("\n").map((line) => {
    const colon = line.indexOf(": ");
    return [line.slice(0, colon), line.slice(colon + 2)];
  }));
  if (fields.event === "change") listener.report(() => apply(JSON.parse(fields.data)));
  if (fields.event === "preseeds") listener.preseeds(JSON.parse(fields.data));
}

function apply(change) {
  if (change.whole) {
    hosts.clear();
    nodes.clear();
    changedHosts.clear();
    changedNodes.clear();
    layouts.hosts += 1;
    layouts.tree += 1;
    pending = null;
  }
  applyHosts(change);
  applyTree(change.tree);
  const story = (pending ? pending.story : []).concat(change.story).slice(-STORY_LINES_MAX);
  const clear = change.whole || (pending !== null && pending.clear);
  pending = { clear, totals: change.totals, silent: change.silent, swarms: change.swarms, troubled: change.troubled, story };
}

function applyHosts(change) {
  for (const [number, name, zone, rack] of change.hosts) {
    const host = hosts.get(number) || { number, name: "", key: "", zone, rack, done: WHOLE, flags: 0, x: 0, y: 0 };
    if (hosts.has(number) && host.name === name && host.zone === zone && host.rack === rack) continue; // it has come back to its place
    if (host.name !== name) host.key = naturalKey(name);
    Object.assign(host, { name, zone, rack });
    hosts.set(number, host);
    layouts.hosts += 1;
  }
  for (const number of change.forgotten) {
    changedHosts.delete(hosts.get(number)); // nobody draws in a hidden tab, and it may be one for weeks
    if (hosts.delete(number)) layouts.hosts += 1;
  }
  for (const [number, done, flags] of change.states) {
    const host = hosts.get(number);
    if (!host) continue;
    host.done = done;
    host.flags = flags;
    changedHosts.add(host);
  }
}

function applyTree(rows) {
  for (const [number, done, parent] of rows) {
    const node = nodes.get(number);
    if (done === ABSENT) {
      changedNodes.delete(node);
      if (nodes.delete(number)) layouts.tree += 1;
    } else if (!node) {
      nodes.set(number, { number, done, parent, x: 0, y: 0, above: null, depth: 0, low: 0, high: 0, below: [], loose: false, seen: false });
      layouts.tree += 1;
    } else {
      // The edge of a host that has the whole stripe is drawn otherwise.
      if (node.parent !== parent || (node.done === WHOLE) !== (done === WHOLE)) layouts.tree += 1;
      node.done = done;
      node.parent = parent;
      changedNodes.add(node);
    }
  }
}
