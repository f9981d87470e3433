// One host: where it is, how it does, and what the tracker remembers of it.

import { ask } from "./api.js";
import { element, make, setText } from "./canvas.js";
import { recordLine } from "./day.js";
import { AWAY, hosts, RECEIVING } from "./feed.js";
import { bytes, seconds } from "./words.js";

const LOOK_MS = 3000, LINES_MAX = 30;
let shown = null, timer = 0; // the name of the host that is shown

export const shownHost = () => shown;

// Show a host; null closes the view.
export function showHost(name) {
  shown = name;
  clearTimeout(timer);
  element("#host").hidden = name === null;
  if (name === null) return;
  setText(element("#host h3"), name);
  element("#host dl").replaceChildren();
  element("#host ol").replaceChildren();
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
  element("#host ol").replaceChildren(...(history.status === "fulfilled" ? history.value.records.map(recordLine) : [make("li", history.reason.message)]));
  timer = setTimeout(() => look(name), LOOK_MS);
}

function facts(host) {
  const row = [...hosts.values()].find((each) => each.name === host.host);
  const rate = (value) => (value ? `${bytes(value)}/s` : "");
  return [
    ["state", host.present ? (host.leaving ? "leaving" : "connected") : `away for ${seconds(host.absent_s)}`],
    ["receives", row && !(row.flags & AWAY) ? (row.flags & RECEIVING ? `${row.done / 10} % done` : "nothing") : ""],
    ["site", host.site], ["zone", host.zone], ["rack", host.rack], ["address", host.address], ["blobs", String(host.blobs)],
    ["uplink", rate(host.uplink_bytes_s)], ["own limit of its downlink", rate(host.download_bytes_s)],
    ["blamed by", Object.entries(host.blamed).map(([other, reason]) => `${other} (${reason})`).join(", ")],
  ];
}
