// Questions to the tracker besides the feed, with the token of the page.

import { credentials } from "./credential.js";

const ANSWER_MS = 10_000;

// The JSON that a path answers with. Rejects with an error whose message says what the tracker refused and what to do.
export async function ask(path, method = "GET", body = undefined) {
  const headers = credentials();
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store", redirect: "error", signal: AbortSignal.timeout(ANSWER_MS) });
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  throw new Error([answer.detail || `the tracker answered ${response.status}`, answer.remedy].filter(Boolean).join(". "));
}
