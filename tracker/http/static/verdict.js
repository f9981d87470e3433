// One sentence: whether anything is wrong, and what.

import { element, make } from "./canvas.js";
import { several } from "./words.js";

const NAMED_MAX = 3;
const parts = { connection: [], fleet: [], origin: [], preseeds: [], day: [] }; // [text, fragment] of what is wrong, by what reports it
let calm = "", said = null;

// One reporter says what is wrong by what it knows.
export function judge(part, wrongs) {
  parts[part] = wrongs;
  say();
}

export function judgeFleet(totals, packages, silent, troubled) {
  const wrongs = silent.map(([tracker]) => [`the tracker ${tracker} does not answer`, ""]);
  for (const found of packages.filter((each) => each.state === "stalled").slice(0, NAMED_MAX)) {
    wrongs.push([`${found.name} does not move`, `package=${found.key.replace("sha256:", "").slice(0, 12)}`]);
  }
  for (const [word, count] of [["away", totals.away], ["blamed", totals.blamed], ["slow", totals.slow]]) {
    if (!count) continue;
    const names = troubled.filter(([, why]) => why.includes(word)).map(([name]) => name);
    if (count <= NAMED_MAX && names.length === count) names.forEach((name) => wrongs.push([`${name} is ${word}`, `host=${encodeURIComponent(name)}`]));
    else wrongs.push([`${several(count, "a host is", "hosts are")} ${word}`, "troubled"]);
  }
  const moving = packages.filter((each) => each.state !== "seeded").length;
  calm = `${several(totals.hosts, "One host", "hosts")}, ` +
    (moving ? `${several(moving, "one package is", "packages are")} on ${moving === 1 ? "its" : "their"} way` : "nothing is on its way");
  judge("fleet", wrongs);
}

function say() {
  // What was reported before counts no more while the tracker does not answer.
  const wrongs = parts.connection.length ? parts.connection : Object.values(parts).flat(), line = element("#verdict"), now = JSON.stringify([wrongs, calm]);
  if (now === said) return;
  said = now;
  line.className = wrongs.length ? "wrong" : "well";
  if (!wrongs.length) {
    line.replaceChildren(calm ? `Nothing is wrong. ${calm}.` : "");
    return;
  }
  const words = ["Wrong: "];
  wrongs.forEach(([text, fragment], i) => {
    if (i) words.push("; ");
    const link = make(fragment ? "a" : "span", text);
    if (fragment) link.href = `#${fragment}`;
    words.push(link);
  });
  line.replaceChildren(...words, ".");
}
