// One host: where it is, how it does, and what the tracker remembers of it.

import { ask } from "./api.js";
import { element, make, setText } from "./canvas.js";
import { recordLine } from "./day.js";
import { AWAY, hosts, RECEIVING } from "./feed.js";
import { orderButton, isAsking } from "./orders.js";
import { evictButton, packagesWith } from "./packages.js";
import { bytes, seconds } from "./words.js";

const LOOK_MS = 3000, LINES_MAX = 30, PACKAGES_MAX = 12;
let shown = null, timer = 0; // the name of the host that is shown
let offered = ""; // what the buttons of the host were made for

// Show a host; null closes the view.
export function showHost(name) {
  shown = name;
  clearTimeout(timer);
  element("#host").hidden = name === null;
  if (name === null) return;
  setText(element("#host h3"), name);
  element("#host dl").replaceChildren();
  element("#host ol").replaceChildren();
  element("#host .orders").replaceChildren();
  setText(element("#host .says"), "");
  offered = "";
  look(name);
  if (element("#host").scrollIntoView) element("#host").scrollIntoView({ block: "nearest" });
}

async function look(name) {
  const [status, history] = await Promise.allSettled([
    ask(`v1/hosts/${encodeURIComponent(name)}`), ask(`v1/history?host=${encodeURIComponent(name)}&since=24h&limit=${LINES_MAX}`),
  ]);
  if (shown !== name) return;
  const pairs = status.status === "fulfilled" ? facts(status.value) : [["problem", status.reason.message]];
  element("#host dl").replaceChildren(...pairs.filter(([, value]) => value).map(([term, value]) => {
    const pair = make("div");
    pair.append(make("dt", term), make("dd", value));
    return pair;
  }));
  if (status.status === "fulfilled") offer(status.value);
  element("#host ol").replaceChildren(...(history.status === "fulfilled" ? history.value.records.map(recordLine) : [make("li", history.reason.message)]));
  timer = setTimeout(() => look(name), LOOK_MS);
}

// The packages of a host, and what can be done with it.
function offer(host) {
  const line = element("#host .orders"), packages = packagesWith(host.swarms).filter((found) => found.manifest).slice(0, PACKAGES_MAX);
  const key = JSON.stringify([host.present, host.drained, packages.map((found) => found.name)]);
  if (key === offered || isAsking(line)) return;
  offered = key;
  const says = element("#host .says"), path = `v1/hosts/${encodeURIComponent(host.host)}/drain`;
  const parts = [host.drained ?
    orderButton("Fill", "hosts", `Have ${host.host} serve other hosts again?`, says, () => ask(path, "DELETE").then(() => `${host.host} serves other hosts again.`)) :
    orderButton("Drain", "hosts", `Have ${host.host} serve no other host?`, says, () => ask(path, "POST").then(() => `${host.host} serves no other host.`))];
  for (const found of packages) {
    const part = make("span", undefined, "held"), link = make("a", found.name);
    link.href = `#package=${found.manifest.replace("sha256:", "").slice(0, 12)}`;
    part.append(link, " ");
    if (host.present) part.append(evictButton("Evict", found, { hosts: [host.host] }, host.host, says));
    parts.push(" ", part);
  }
  line.replaceChildren(...parts);
}

function facts(host) {
  const row = [...hosts.values()].find((each) => each.name === host.host);
  const rate = (value) => (value ? `${bytes(value)}/s` : "");
  return [
    ["state", host.present ? (host.leaving ? "leaving" : host.drained ? "drained: it serves no other host" : "connected") : `away for ${seconds(host.absent_s)}`],
    ["receives", row && !(row.flags & AWAY) ? (row.flags & RECEIVING ? `${row.done / 10} % done` : "nothing") : ""],
    ["site", host.site], ["zone", host.zone], ["rack", host.rack], ["address", host.address], ["blobs", String(host.blobs)],
    ["version", host.version], ["store", host.store_bytes === null ? "" : `${bytes(host.store_bytes)}${host.capacity_bytes ? ` of ${bytes(host.capacity_bytes)}` : ""}`],
    ["disk free", host.disk_free_bytes === null ? "" : bytes(host.disk_free_bytes)],
    ["shows", host.mounts ? host.mounted.concat(host.mounts > host.mounted.length ? [`${host.mounts} views in all`] : []).join(", ") : ""],
    ["uplink", rate(host.uplink_bytes_s)], ["own limit of its downlink", rate(host.download_bytes_s)],
    ["blamed by", Object.entries(host.blamed).map(([other, reason]) => `${other} (${reason})`).join(", ")],
  ];
}
