// The page of swarm health: joins the feed with what shows it.
//
// A report is taken in at once and shown in frames: the work is cut into steps, of which each frame takes as many as fit into FRAME_MS, so
// that thousands of hosts never keep the page from answering. A report that comes meanwhile begins the work anew.

import { element, make, readInk, resized } from "./canvas.js";
import { followDay } from "./day.js";
import { hasPending, hosts, listen, nodes, select, selection, takePending } from "./feed.js";
import { describeHost, drawHosts, forgetPlaces, hostAt } from "./host_map.js";
import { showHost } from "./host_view.js";
import { isShown, packagesMoved, packagesOf, showPackages, unfold } from "./packages.js";
import * as rate from "./plot.js";
import { learnRights } from "./orders.js";
import { prepareForm, showPreseeds } from "./preseeds.js";
import { filterStory, noteScroll, showConnection, showSilent, showStory, showTotals, showTroubled } from "./tables.js";
import { describeNode, drawTree, forgetShape, nodeAt } from "./tree.js";
import { judgeFleet } from "./verdict.js";

const FRAME_MS = 8, UPDATES_MEASURED_MAX = 1000, NAMES_MAX = 20;
let unfolded = true; // the package that the address names was found
let steps = null, frame = 0; // the work under way, and the frame that was asked for
let update = null; // {all_ms, longest_ms} of the report that is being shown
const measured = { updates: 0, all_ms: [], longest_ms: [] }; // for benchmarks: what showing a report took, and its longest step
window.swarmHealth = { measured, hosts, nodes, idle: () => !frame && !steps };

function wake() {
  if (!frame) frame = requestAnimationFrame(work);
}

// One frame.
function work() {
  frame = 0;
  timed(() => {
    const until = performance.now() + FRAME_MS;
    if (hasPending() || !steps) steps = show();
    while (steps && performance.now() < until) {
      if (steps.next().done) steps = null;
    }
  });
  if (steps) wake();
  else endUpdate();
}

function* show() {
  const report = takePending();
  if (report) {
    showTotals(report.totals);
    showSilent(report.silent);
    const packages = packagesOf(report.swarms);
    yield;
    showPackages(packages);
    if (!unfolded) follow();
    yield;
    showTroubled(report.troubled);
    judgeFleet(report.totals, packages, report.silent, report.troubled.map(([number, why]) => [(hosts.get(number) || { name: "?" }).name, why]));
    yield;
    rate.showRate(report.totals.rate_bytes_s);
    yield;
    yield* showStory(report.story, report.clear);
  }
  yield* drawHosts();
  yield* drawTree();
}

function timed(part) {
  const began = performance.now();
  part();
  const took = performance.now() - began;
  if (!update) return;
  update.all_ms += took;
  update.longest_ms = Math.max(update.longest_ms, took);
}

function endUpdate() {
  if (!update) return;
  measured.updates += 1;
  for (const name of ["all_ms", "longest_ms"]) {
    measured[name].push(update[name]);
    if (measured[name].length > UPDATES_MEASURED_MAX) measured[name].shift();
  }
  update = null;
}

function report(apply) {
  endUpdate();
  update = { all_ms: 0, longest_ms: 0 };
  timed(apply);
  wake();
}

function repaint() {
  readInk();
  forgetPlaces();
  forgetShape();
  packagesMoved();
  rate.draw();
  steps = null;
  wake();
}

// What the fragment of the page's address asks for: host=NAME, package=DIGITS, or the id of something on the page.
function follow() {
  const fragment = location.hash.slice(1), split = fragment.indexOf("="), kind = fragment.slice(0, split);
  let value = fragment.slice(split + 1);
  try {
    value = decodeURIComponent(value);
  } catch {
    return; // it is no text
  }
  showHost(kind === "host" ? value : null);
  const wanted = kind === "package" ? value : "";
  unfold(wanted);
  unfolded = isShown(wanted) || !wanted;
  const target = document.getElementById(fragment);
  if (target && target.closest("details")) target.closest("details").open = true;
  if (target) target.scrollIntoView({ block: "nearest" });
  wake();
}

// Find a host with "/", move through hosts with j and k, or on the map with the arrow keys, and leave what is shown with Escape.
function press(event) {
  const { key, target } = event, types = target.closest("input, select, textarea") !== null;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (key === "Escape") {
    if (types) target.blur();
    else if (location.hash) location.hash = "";
    return;
  }
  if (types) return;
  if (key === "/") {
    element("#find input").focus();
    element("#find input").select();
    event.preventDefault();
    return;
  }
  const back = key === "k" || key === "ArrowLeft", arrow = key.startsWith("Arrow");
  if (!["j", "k", "ArrowLeft", "ArrowRight"].includes(key) || (arrow && target !== element("#hosts canvas"))) return;
  const names = [...hosts.values()].sort((a, b) => (a.key < b.key ? -1 : 1)).map((host) => host.name);
  // By the address, which is ahead of what is shown while keys come fast.
  const now = names.findIndex((name) => location.hash === `#host=${encodeURIComponent(name)}`);
  const next = now < 0 ? (back ? -1 : 0) : now + (back ? -1 : 1);
  if (names.length) location.hash = `host=${encodeURIComponent(names[(next + names.length) % names.length])}`;
  event.preventDefault();
}

// Names of hosts that contain what is being typed.
function complete(event) {
  const typed = event.target.value.toLowerCase(), names = [];
  for (const host of typed ? hosts.values() : []) {
    if (host.name.toLowerCase().includes(typed)) names.push(host.name);
    if (names.length === NAMES_MAX) break;
  }
  element("#host-names").replaceChildren(...names.map((name) => {
    const option = make("option");
    option.value = name;
    return option;
  }));
}

function find(event) {
  event.preventDefault();
  const typed = element("#find input").value.trim(), all = [...hosts.values()].map((host) => host.name);
  const name = all.find((each) => each === typed) || all.find((each) => each.toLowerCase().includes(typed.toLowerCase()));
  if (typed) location.hash = `host=${encodeURIComponent(name || typed)}`;
}

const open = (host) => { if (host) location.hash = `host=${encodeURIComponent(host.name)}`; };

readInk();
prepareForm();
learnRights();
element("#hosts canvas").addEventListener("mousemove", describeHost);
element("#tree canvas").addEventListener("mousemove", describeNode);
element("#hosts canvas").addEventListener("click", (event) => open(hostAt(event)));
element("#tree canvas").addEventListener("click", (event) => open(nodeAt(event)));
element("#find").addEventListener("submit", find);
element("#find input").addEventListener("input", complete);
addEventListener("hashchange", follow);
addEventListener("keydown", press);
element("#tree select").addEventListener("change", (event) => select(selection.swarm, Number(event.target.value)));
element("#story input").addEventListener("input", filterStory);
element("#story ol").addEventListener("scroll", noteScroll);
new ResizeObserver(() => { if (resized()) repaint(); }).observe(element("main"));
document.addEventListener("visibilitychange", () => { if (!document.hidden) repaint(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
follow();

function begin() {
  followDay();
  listen({ report, preseeds: showPreseeds, connection: (text, lost) => {
    showConnection(text, lost);
    if (!lost) learnRights(); // perhaps with another token
  } });
}

// The page is seen before the tracker is asked: a report of thousands of hosts would keep both from it.
if (document.hidden) begin();
else requestAnimationFrame(() => setTimeout(begin));
