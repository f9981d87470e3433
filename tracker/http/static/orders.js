// What the page has the tracker do: buttons that ask once, say what came of it, and say why they are off where the token lacks the right.

import { ask } from "./api.js";
import { make, setText } from "./canvas.js";

let me = null; // the answer of GET /v1/me; null until it has come

// Ask anew what this page may do, as after another token was given.
export function learnRights() {
  ask("v1/me").then((answer) => {
    me = answer;
    document.querySelectorAll("button[data-right]").forEach(arm);
  }, () => {}); // the feed says what is wrong with the tracker or the token
}

const may = (right) => me !== null && (me.kind === "open" || me.rights.includes(right));

function arm(button) {
  const rights = button.dataset.right.split(" "), allowed = rights.some(may);
  button.disabled = !allowed;
  button.title = allowed ? "" : me === null ? "the tracker has not said yet what this page may do" :
    `needs a token whose role has the right ${rights.join(" or ")}`;
}

// A button that asks `question` and then calls `act`, whose promise is of a text that says what was done. `rights`: any of them, with spaces
// between. `says` is the element that shows what came of it.
export function orderButton(text, rights, question, says, act) {
  const button = make("button", text, "act");
  button.type = "button";
  button.dataset.right = rights;
  arm(button);
  button.addEventListener("click", () => confirmOnce(button, question, says, act));
  return button;
}

// Ask in the button's place. The answer No, Escape and leaving the page do nothing.
export function confirmOnce(button, question, says, act) {
  const asking = make("span", `${typeof question === "function" ? question() : question} `, "asking");
  const yes = make("button", "Yes", "act"), no = make("button", "No", "act"), back = () => { asking.replaceWith(button); button.focus(); };
  for (const each of [yes, no]) each.type = "button";
  asking.setAttribute("role", "group");
  asking.append(yes, " ", no);
  no.addEventListener("click", back);
  asking.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    back();
  });
  yes.addEventListener("click", () => {
    back();
    button.disabled = true;
    tell(says, "…", false);
    act().then((done) => tell(says, done, false), (problem) => tell(says, problem.message, true)).finally(() => arm(button));
  });
  button.replaceWith(asking);
  no.focus();
}

function tell(says, text, wrong) {
  setText(says, text);
  says.classList.toggle("problem", wrong);
}

// Whether a question is open within an element, which is then not to be made anew.
export const isAsking = (parent) => parent.querySelector(".asking") !== null;
