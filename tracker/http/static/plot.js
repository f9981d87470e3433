// The rate at which all hosts together receive, over the last minutes, drawn by uPlot (vendor/), which is loaded when there is something to
// draw: the page is seen before.

import { element, ink, make } from "./canvas.js";
import { bytes, clock } from "./words.js";

const SAMPLES_MAX = 600, HEIGHT_PX = 150; // ten minutes
const STEPS = Array.from({ length: 40 }, (_, power) => 2 ** (power + 8)); // between lines, so that labels are round
const times = [], rates = [];
let plot = null, asked = false; // asked: for uPlot
new ResizeObserver(() => { if (plot && plot.width !== wide()) plot.setSize({ width: wide(), height: HEIGHT_PX }); }).observe(element("#rate .plot"));

const wide = () => Math.max(200, element("#rate .plot").clientWidth);

export function showRate(rate_bytes_s) {
  times.push(Date.now() / 1000);
  rates.push(rate_bytes_s);
  if (times.length > SAMPLES_MAX) {
    times.shift();
    rates.shift();
  }
  if (!asked) load();
  else if (!plot) draw();
  else plot.setData([times, rates]);
}

function load() {
  asked = true;
  const sheet = make("link"), script = make("script");
  Object.assign(sheet, { rel: "stylesheet", href: "static/vendor/uPlot.min.css" });
  Object.assign(script, { src: "static/vendor/uPlot.iife.min.js", onload: draw });
  document.head.append(sheet, script);
}

// Draw anew, in the colours and the width of now.
export function draw() {
  if (!times.length || !window.uPlot) return;
  const host = element("#rate .plot");
  if (plot) plot.destroy();
  const clocks = (_, ticks) => ticks.map((tick) => clock(tick));
  const axis = { stroke: ink.faint, grid: { stroke: ink.line, width: 1 }, ticks: { stroke: ink.line, width: 1 } };
  plot = new window.uPlot({
    width: wide(), height: HEIGHT_PX, legend: { show: false },
    cursor: { show: false },
    scales: { x: { range: (_, low, high) => [Math.min(low, high - 60), high] }, y: { range: (_, low, high) => [0, Math.max(high, 1024)] } },
    axes: [{ ...axis, space: 70, values: clocks }, { ...axis, size: 92, incrs: STEPS, values: (_, ticks) => ticks.map((tick) => `${bytes(tick)}/s`) }],
    series: [{}, { stroke: ink.accent, fill: ink.veil, width: 1.5, points: { show: false } }],
  }, [times, rates], host);
}
