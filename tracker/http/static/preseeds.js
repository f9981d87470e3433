// Preseeds: the ones that go on with the hosts that lack the package and why, ended ones folded, and what a token may do with them.

import { ask } from "./api.js";
import { element, make, setText } from "./canvas.js";
import { confirmOnce, isAsking, orderButton } from "./orders.js";
import { judge } from "./verdict.js";
import { brief, clock, several } from "./words.js";

const ENDED = ["done", "failed", "cancelled", "expired"];
const NAMED_MAX = 8, DETAILS_MAX = 5, DETAILS_MS = 3000, RECENT_S = 24 * 3600;
const details = new Map(); // id -> what the tracker answered last
let rows = [], timer = 0;

export function showPreseeds(news) {
  rows = [...news].reverse();
  if (!isAsking(element("#preseeds"))) draw();
  if (!timer) lookAgain();
}

function draw() {
  const live = rows.filter((row) => !ENDED.includes(row.state)), ended = rows.filter((row) => ENDED.includes(row.state));
  for (const id of details.keys()) if (!rows.some((row) => row.id === id)) details.delete(id);
  element("#preseeds .live").replaceChildren(...live.map(item));
  element("#preseeds .ended").replaceChildren(...ended.map(item));
  element("#preseeds details").hidden = !ended.length;
  setText(element("#preseeds summary"), `${ended.length} ended`);
  const failed = rows.filter((row) => row.state === "failed" && Date.now() / 1000 - row.created_at < RECENT_S);
  judge("preseeds", failed.map((row) => [`the preseed of ${brief(row.package)} failed`, `preseed=${encodeURIComponent(row.id)}`]));
}

function item(row) {
  const line = make("li"), head = make("div"), ends = ENDED.includes(row.state), known = details.get(row.id);
  line.id = `preseed=${encodeURIComponent(row.id)}`;
  head.append(nameOf(row), " ", make("span", row.state, `state-${row.state}`), ` ${row.hosts_done} of ${row.hosts_total} hosts `,
    make("small", `${row.id}, since ${clock(row.created_at)}`));
  line.append(head);
  if (known) for (const text of lacks(known)) line.append(make("p", text));
  const name = brief(row.package), says = element("#preseeds .says");
  if (!ends) {
    head.append(" ", orderButton("Cancel", "preseed cancel-any", `Cancel the preseed of ${name}?`, says,
      () => ask(`v1/preseeds/${encodeURIComponent(row.id)}`, "DELETE").then(() => `The preseed ${row.id} is cancelled.`)));
  }
  const missing = known ? known.failures.map((failure) => failure.host) : [];
  if (row.state === "failed" && missing.length) {
    const hosts = several(missing.length, "one host", "hosts");
    head.append(" ", orderButton(`Try again on ${hosts}`, "preseed", `Preseed ${name} again on ${hosts}?`, says,
      () => ask("v1/preseeds", "POST", { package: row.package, hosts: missing }).then((made) => `The preseed ${made.id} has begun.`)));
  }
  return line;
}

// Which hosts lack the package, and why, in lines.
function lacks(progress) {
  const named = (names) => names.slice(0, NAMED_MAX).join(", ") + (names.length > NAMED_MAX ? ` and ${names.length - NAMED_MAX} more` : "");
  const reasons = new Map();
  for (const { host, reason } of progress.failures) reasons.set(reason, [...(reasons.get(reason) || []), host]);
  const lines = [...reasons].map(([reason, hosts]) => `${named(hosts)}: ${reason}`);
  if (progress.waiting.length) lines.push(`still receive: ${named(progress.waiting)}`);
  return lines.concat(progress.notes);
}

// The package of a preseed, with a link to its row where that is shown.
function nameOf(row) {
  const digest = row.package.split("@sha256:")[1], name = make("strong");
  const link = digest ? make("a", brief(row.package)) : make("span", brief(row.package));
  if (digest) link.href = `#package=${digest.slice(0, 12)}`;
  name.append(link);
  return name;
}

// The form that orders a preseed: a package, and hosts by a selector, by names, or a number of them.
export function prepareForm() {
  const form = element("#order"), [reference, where] = form.querySelectorAll("input"), button = form.querySelector("button");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const order = { package: reference.value.trim() }, chosen = where.value.trim();
    if (!order.package || !chosen || button.disabled) return;
    if (/^[0-9]+$/.test(chosen)) order.count = Number(chosen);
    else if (chosen.includes("=")) order.selector = chosen;
    else if (chosen) order.hosts = chosen.split(/[\s,]+/);
    const whom = order.count ? several(order.count, "one host", "hosts") : chosen;
    confirmOnce(button, `Preseed ${order.package} on ${whom}?`, element("#preseeds .says"),
      () => ask("v1/preseeds", "POST", order).then((made) => {
        reference.value = "";
        return `The preseed ${made.id} has begun on ${several(made.hosts_total, "one host", "hosts")}.`;
      }));
  });
}

// Put a package into the form, for a user who says where.
export function suggestPreseed(reference) {
  const [input, where] = element("#order").querySelectorAll("input");
  input.value = reference;
  element("#order").scrollIntoView({ block: "nearest" });
  where.focus();
}

// Ask for the preseeds that go on, and once for those that failed.
async function lookAgain() {
  timer = -1; // it is under way
  const asked = rows.filter((row) => !ENDED.includes(row.state) || (row.state === "failed" && (details.get(row.id) || {}).state !== "failed"));
  let changed = false;
  for (const row of document.hidden ? [] : asked.slice(0, DETAILS_MAX)) {
    const answer = await ask(`v1/preseeds/${encodeURIComponent(row.id)}`).catch(() => null);
    changed = changed || JSON.stringify(answer && lacks(answer)) !== JSON.stringify(details.has(row.id) ? lacks(details.get(row.id)) : null);
    if (answer) details.set(row.id, answer);
  }
  if (changed && !isAsking(element("#preseeds")) && !element("#preseeds ul").contains(document.activeElement)) draw();
  timer = rows.length ? setTimeout(lookAgain, DETAILS_MS) : 0;
}
