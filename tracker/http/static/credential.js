// The token that a tracker with access control asks for. It is kept until the browser's tab is closed, sent as a bearer header, and never
// part of an address. No cookies: a page of another site could have the browser send these.

import { element, setText } from "./canvas.js";

const KEY = "p2pdist-token";

// Header fields that carry the token.
export function credentials() {
  const token = sessionStorage.getItem(KEY);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

// Ask for a token, and say why; calls `given` once there is another one.
export function askForToken(problem, given) {
  const form = element("#credential");
  sessionStorage.removeItem(KEY);
  setText(element("#credential p"), [problem.detail, problem.remedy].filter(Boolean).join(". "));
  form.hidden = false;
  element("#credential input").focus();
  form.onsubmit = (event) => {
    event.preventDefault();
    const input = element("#credential input"), token = input.value.trim();
    if (!token) return;
    sessionStorage.setItem(KEY, token);
    input.value = "";
    form.hidden = true;
    given();
  };
}
