// The last day as the tracker remembers it (GET /v1/history), and whether its origin can be read (GET /readyz).

import { ask } from "./api.js";
import { element, make, setText } from "./canvas.js";
import { judge } from "./verdict.js";
import { brief, clock, seconds, several } from "./words.js";

const LOOK_MS = 10_000, RECORDS_MAX = 200, BROADCASTS_MAX = 40, LINES_MAX = 60, RECENT_S = 3600;
let newest = -1, failing = false, timer = 0;

export function followDay() {
  clearTimeout(timer);
  look().catch((problem) => {
    failing = true;
    setText(element("#day .none"), `The history is not shown: ${problem.message}`);
  }).finally(() => { timer = setTimeout(followDay, LOOK_MS); });
}

async function look() {
  if (document.hidden) return;
  judgeTracker(await ask("readyz"));
  const { records } = await ask(`v1/history?since=24h&limit=${RECORDS_MAX}`);
  const latest = records.length ? records[0].number : 0;
  judgeDay(records);
  if (latest === newest && !failing) return;
  [newest, failing] = [latest, false];
  const broadcasts = records.filter((record) => record.event.broadcast).slice(0, BROADCASTS_MAX);
  element("#day tbody").replaceChildren(...broadcasts.map(broadcastLine));
  const others = records.filter((record) => !record.event.broadcast).slice(0, LINES_MAX);
  element("#day ol").replaceChildren(...others.map(recordLine));
  setText(element("#day .none"), others.length ? "" : "None.");
}

function judgeTracker(health) {
  const wrongs = [];
  if (health.origin && health.origin.reachable === false) wrongs.push([`the origin cannot be read${health.origin.problem ? `: ${health.origin.problem}` : ""}`, ""]);
  if (health.policies && health.policies.problem) wrongs.push([`the policies are stale: ${health.policies.problem}`, ""]);
  judge("origin", wrongs);
}

function judgeDay(records) {
  const failed = records.filter((record) => record.event.kind === "pull-failed" && Date.now() / 1000 - record.at < RECENT_S);
  judge("day", failed.length ? [[`${several(failed.length, "a pull has", "pulls have")} failed in the last hour`, "day"]] : []);
}

function broadcastLine(record) {
  const line = make("tr"), { event } = record, { broadcast } = event;
  const late = (broadcast.stragglers || []).map((straggler) => `${straggler.host}: ${straggler.reason}`);
  const more = broadcast.stragglers_more || 0;
  const name = brief(event.package) || event.digest.replace("sha256:", "").slice(0, 12);
  for (const text of [clock(record.at), name, broadcast.complete === broadcast.hosts ? broadcast.hosts : `${broadcast.complete} of ${broadcast.hosts}`,
    seconds(broadcast.seconds), seconds(broadcast.to_50_s), seconds(broadcast.to_99_s),
    broadcast.origin_copies === null || broadcast.origin_copies === undefined ? "" : broadcast.origin_copies.toFixed(2),
    late.slice(0, 3).join("; ") + (late.length + more > 3 ? `; ${late.length + more - 3} more` : "")]) line.append(make("td", String(text)));
  line.title = event.text;
  line.lastChild.className = "why";
  return line;
}

export function recordLine(record) {
  const line = make("li", undefined, `kind-${record.event.kind}`), time = make("time", clock(record.at));
  time.dateTime = new Date(record.at * 1000).toISOString();
  line.append(time, record.event.text);
  return line;
}
