// What the host map and the tree share: colours of the style sheet, canvases of pixels, the pointer.

export const ROWS_PER_STEP = 1000; // of drawing: as much as one step of a frame does
const LETTERS_MAX = 1000; // words that are kept drawn
const RAMPS = {
  light: ramp(["#c4dcf3", "#8dbbe3", "#5596cd", "#2b70b0", "#0d4a86"], 101),
  dark: ramp(["#1d3b5c", "#2a5c8d", "#4183bd", "#69abdf", "#a8d6ff"], 101),
};
const sizes = new Map(); // canvas -> [width, height], so that painting need not wait for a layout
export let ink = {}; // colours by what they mean, in the scheme that the browser prefers
export let dye = {}; // the same as pixels, for sheets

export const element = (selector) => document.querySelector(selector);

// Set a text, unless the element has it: that would cost a layout.
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// Set an attribute, unless the element has it.
export function setAttribute(target, name, value) {
  if (target.getAttribute(name) !== value) target.setAttribute(name, value);
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
  ink = {};
  for (const name of ["text", "faint", "edge", "line", "veil", "idle", "away", "slow", "blamed", "drained", "accent"]) ink[name] = style(`--${name === "text" ? "ink" : name}`);
  dye = Object.fromEntries(Object.entries(ink).filter(([name]) => name !== "veil").map(([name, colour]) => [name, pixel(...channels(colour))]));
  dye.ramp = matchMedia("(prefers-color-scheme: dark)").matches ? RAMPS.dark : RAMPS.light;
}

// A pixel as a word of an image's bytes: red, green, blue and opacity, the first one lowest.
function pixel(red, green, blue) {
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
}

function channels(colour) {
  return [1, 3, 5].map((from) => parseInt(colour.slice(from, from + 2), 16));
}

function ramp(stops, steps) {
  const parts = stops.map(channels);
  return Array.from({ length: steps }, (_, step) => {
    const exact = (step / (steps - 1)) * (parts.length - 1), below = Math.min(Math.floor(exact), parts.length - 2);
    return pixel(...parts[below].map((low, i) => Math.round(low + (parts[below + 1][i] - low) * (exact - below))));
  });
}

// The pixel of a progress in thousandths.
export const shade = (done) => dye.ramp[Math.floor(done / 10)];

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

// The pixels of a canvas, which it shows when it is told to. Thousands of squares and lines cost a tenth of what a pen takes for them, since
// nothing is kept of them but what is seen. Places and sizes are in pixels of the style sheet.
export class Sheet {
  constructor(canvas) {
    this.canvas = canvas;
    this.letters = new Map(); // what was written -> its image; forgotten with the colours and the scale
    this.hidden = document.createElement("canvas"); // where words are drawn
    this.image = null;
    this.unseen = false; // whether something was drawn since it was shown
  }

  // Begin with nothing, in this size.
  begin(width, height) {
    const wide = Math.max(1, Math.round(width * scale())), high = Math.max(1, Math.round(height * scale()));
    if (this.scale !== scale() || this.colours !== dye) this.letters.clear();
    Object.assign(this, { height, scale: scale(), colours: dye, unseen: true });
    if (this.image && this.image.width === wide && this.image.height === high) {
      this.pixels.fill(0);
      return;
    }
    this.image = new ImageData(wide, high);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  // A square from its upper left corner; with a frame inside it, `thick` pixels, where `frame` is a colour.
  square(x, y, size, colour, frame = colour, thick = 0) {
    const { width: wide, height: high } = this.image, pixels = this.pixels, side = Math.max(1, Math.round(size * this.scale));
    const left = Math.max(0, Math.min(wide - side, Math.round(x * this.scale))), half = side >> 1;
    const top = Math.max(0, Math.min(high - side, Math.round(y * this.scale)));
    if (pixels[top * wide + left] === frame && pixels[(top + half) * wide + left + half] === colour) return;
    this.unseen = true;
    this.fill(top * wide + left, side, frame);
    if (frame === colour) return;
    const edge = Math.max(1, Math.floor(thick * this.scale));
    this.fill((top + edge) * wide + left + edge, side - 2 * edge, colour);
  }

  // Squares are a few pixels wide: a call of the array's own fill for each row would take several times as long.
  fill(first, side, colour) {
    const { pixels, image: { width: wide } } = this;
    for (let row = first, last = first + side * wide; row < last; row += wide) {
      for (let at = row, end = row + side; at < end; at += 1) pixels[at] = colour;
    }
  }

  // A line, `strength` of 1 opaque. Across its longer axis it covers two pixels in the shares in which it lies between them (Wu, SIGGRAPH 1991).
  line(x, y, toX, toY, colour, strength) {
    const { width: wide, height: high } = this.image, pixels = this.pixels, rgb = colour & 0xffffff, steep = Math.abs(toY - y) > Math.abs(toX - x);
    let from = (steep ? y : x) * this.scale, to = (steep ? toY : toX) * this.scale;
    let side = (steep ? x : y) * this.scale, end = (steep ? toX : toY) * this.scale;
    if (from > to) [from, to, side, end] = [to, from, end, side];
    const slope = to > from ? (end - side) / (to - from) : 0, along = steep ? wide : 1, across = steep ? 1 : wide;
    const last = Math.min(Math.round(to), (steep ? high : wide) - 1), most = (steep ? wide : high) - 2, full = 255 * strength;
    for (let step = Math.max(0, Math.round(from)); step <= last; step += 1) {
      const exact = side + slope * (step - from), low = Math.floor(exact);
      if (low < 0 || low > most) continue;
      const at = step * along + low * across, cover = (full * (exact - low)) | 0, rest = (full | 0) - cover;
      if (rest >= pixels[at] >>> 24) pixels[at] = (rest << 24) | rgb;
      if (cover >= pixels[at + across] >>> 24) pixels[at + across] = (cover << 24) | rgb;
    }
  }

  // Words whose line has its middle at y; x is where they begin, have their middle or end. Upright ones run down from there.
  write(text, x, y, { size = 10, bold = false, colour = ink.text, align = "left", upright = false } = {}) {
    const key = `${size}${bold}${colour}${upright} ${text}`;
    let drawn = this.letters.get(key);
    if (!drawn) {
      if (this.letters.size >= LETTERS_MAX) this.letters.clear();
      this.letters.set(key, (drawn = this.draw(text, `${bold ? "600 " : ""}${size}px system-ui, sans-serif`, size, colour, upright)));
    }
    const { width: wide, height: high } = this.image, share = align === "right" ? 1 : align === "center" ? 0.5 : 0;
    const left = Math.round(x * this.scale - (upright ? drawn.width / 2 : share * drawn.width));
    const top = Math.round(y * this.scale - (upright ? 0 : drawn.height / 2));
    for (let row = Math.max(0, -top); row < drawn.height && top + row < high; row += 1) {
      for (let column = Math.max(0, -left); column < drawn.width && left + column < wide; column += 1) {
        const found = drawn.pixels[row * drawn.width + column];
        if (found) this.pixels[(top + row) * wide + left + column] = found;
      }
    }
  }

  draw(text, font, size, colour, upright) {
    const pen = this.hidden.getContext("2d", { willReadFrequently: true });
    pen.font = font;
    const long = Math.ceil((pen.measureText(text).width + 1) * this.scale), tall = Math.ceil(1.5 * size * this.scale);
    this.hidden.width = upright ? tall : long; // which also clears it
    this.hidden.height = upright ? long : tall;
    pen.scale(this.scale, this.scale);
    if (upright) {
      pen.translate(1.5 * size, 0);
      pen.rotate(Math.PI / 2);
    }
    Object.assign(pen, { font, fillStyle: colour, textBaseline: "middle" });
    pen.fillText(text, 0, 0.75 * size);
    const { data, width, height } = pen.getImageData(0, 0, this.hidden.width, this.hidden.height);
    return { pixels: new Uint32Array(data.buffer), width, height };
  }

  // Show what was drawn since it was last shown, also by those who were interrupted before they came to it.
  show() {
    if (!this.unseen) return;
    this.unseen = false;
    const { canvas, image } = this, style = `${this.height}px`;
    if (canvas.style.height !== style) canvas.style.height = style;
    if (canvas.width !== image.width) canvas.width = image.width;
    if (canvas.height !== image.height) canvas.height = image.height;
    canvas.getContext("2d").putImageData(image, 0, 0);
  }
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
