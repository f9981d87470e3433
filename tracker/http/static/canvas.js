// Drawing that the host map and the tree share: colours of the style sheet, pens, a canvas behind the visible one, the pointer.

export const ROWS_PER_STEP = 250; // of drawing: as much as one step of a frame does
const RAMPS = {
  light: ramp(["#c4dcf3", "#8dbbe3", "#5596cd", "#2b70b0", "#0d4a86"], 101),
  dark: ramp(["#1d3b5c", "#2a5c8d", "#4183bd", "#69abdf", "#a8d6ff"], 101),
};
const sizes = new Map(); // canvas -> [width, height], so that painting need not wait for a layout
export let ink = {}; // colours by what they mean, in the scheme that the browser prefers

export const element = (selector) => document.querySelector(selector);

// Set a text, unless the element has it: that would cost a layout.
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// A new element with a text and a class.
export function make(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

// Read the colours of the style sheet again.
export function readInk() {
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  ink = { text: style("--ink"), faint: style("--faint"), edge: style("--edge"), sheet: style("--sheet"),
    line: style("--line"), idle: style("--idle"), veil: style("--veil"), away: style("--away"), slow: style("--slow"), blamed: style("--blamed"), drained: style("--drained"), accent: style("--accent"),
    ramp: matchMedia("(prefers-color-scheme: dark)").matches ? RAMPS.dark : RAMPS.light };
}

function ramp(stops, steps) {
  const parts = stops.map((stop) => [1, 3, 5].map((from) => parseInt(stop.slice(from, from + 2), 16)));
  return Array.from({ length: steps }, (_, step) => {
    const exact = (step / (steps - 1)) * (parts.length - 1), below = Math.min(Math.floor(exact), parts.length - 2);
    const mixed = parts[below].map((low, i) => Math.round(low + (parts[below + 1][i] - low) * (exact - below)));
    return `rgb(${mixed.join(",")})`;
  });
}

// The colour of a progress in thousandths.
export const shade = (done) => ink.ramp[Math.floor(done / 10)];

export function sizeOf(canvas) {
  if (!sizes.has(canvas)) sizes.set(canvas, [canvas.clientWidth, canvas.clientHeight]);
  return sizes.get(canvas);
}

// Whether some canvas has another width than it was drawn for; its size is then measured anew.
export function resized() {
  const canvases = [element("#hosts canvas"), element("#tree canvas")]; // not those of plots
  if (canvases.every((canvas) => sizes.has(canvas) && sizes.get(canvas)[0] === canvas.clientWidth)) return false;
  sizes.clear();
  return true;
}

const scale = () => window.devicePixelRatio || 1;

export function penOf(canvas) {
  const pen = canvas.getContext("2d");
  pen.setTransform(scale(), 0, 0, scale(), 0, 0);
  return pen;
}

// A pen for a hidden canvas, and a function that shows what was drawn with it.
export function behind(canvas, width, height) {
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

// The nearest of `things` (with x and y) to a point, within `reach` pixels; null when there is none.
export function nearest(things, x, y, reach) {
  let closest = null, best = reach * reach;
  for (const thing of things) {
    const across = thing.x - x, down = thing.y - y, square = across * across + down * down;
    if (square < best) [closest, best] = [thing, square];
  }
  return closest;
}
