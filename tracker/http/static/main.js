// The page of swarm health: joins the feed with what shows it.
//
// A report is taken in at once and shown in frames: the work is cut into steps, of which each frame takes as many as fit into FRAME_MS, so
// that thousands of hosts never keep the page from answering. A report that comes meanwhile begins the work anew.

import { element, readInk, resized } from "./canvas.js";
import { hasPending, hosts, listen, nodes, select, selection, takePending } from "./feed.js";
import { describeHost, drawHosts, forgetPlaces } from "./host_map.js";
import {
  filterStory, noteScroll, showConnection, showPreseeds, showSilent, showStory, showSwarms, showTotals, showTroubled,
} from "./tables.js";
import { describeNode, drawTree, forgetShape } from "./tree.js";

const FRAME_MS = 8, UPDATES_MEASURED_MAX = 1000;
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
    showSwarms(report.swarms);
    yield;
    showTroubled(report.troubled);
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
  steps = null;
  wake();
}

readInk();
element("#hosts canvas").addEventListener("mousemove", describeHost);
element("#tree canvas").addEventListener("mousemove", describeNode);
element("#tree select").addEventListener("change", (event) => select(selection.swarm, Number(event.target.value)));
element("#story input").addEventListener("input", filterStory);
element("#story ol").addEventListener("scroll", noteScroll);
new ResizeObserver(() => { if (resized()) repaint(); }).observe(element("main"));
document.addEventListener("visibilitychange", () => { if (!document.hidden) repaint(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
listen({ report, preseeds: showPreseeds, connection: showConnection });
