// The live page: a prompt, changes of the model, compared with the original model.
import { pageData } from "./decoding.js";
import { choose, element, find, followTheme, percent, table, token } from "./elements.js";

const data = pageData();
const say = (text) => (find("said").textContent = text);
const changes = [];
const kinds = new Map(data.kinds.map((kind) => [kind.kind, kind]));
const NO_PROMPT = "Type a prompt first, such as: The Eiffel Tower stands in the city of";
let running = null;
let looking = null;
let timer = 0;
let view = ""; // of the page of layers
let lookedAt = "[]"; // the changes in it

async function ask(path, content, signal) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content), signal });
  const said = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(said.error), { refused: true });
  return said;
}

const sent = (listed) => listed.map(({ kind, target, value }) => ({ kind, target, value }));

// What was asked before is called off: the server does not go on with it.
async function look() {
  if (looking) looking.abort();
  looking = new AbortController();
  const asked = sent(changes.filter((change) => change.accepted));
  say("Running the prompt …");
  try {
    const { page } = await ask("explore", { prompt: find("prompt").value, changes: asked }, looking.signal);
    const kept = new URLSearchParams(view);
    // With the first change the page compares both models, and without changes it shows one.
    if ((lookedAt === "[]") !== (asked.length === 0)) for (const key of ["lens", "compare"]) kept.delete(key);
    lookedAt = JSON.stringify(asked);
    find("page").src = `${page}#${kept}`;
    find("page").hidden = find("save").hidden = false;
    find("save").href = `${page}?save`;
    say("");
  } catch (error) {
    if (error.name !== "AbortError") say(error.message);
  }
}

// A slider that moves asks often; what it asked before is called off.
function compareSoon() {
  clearTimeout(timer);
  timer = setTimeout(() => compare(), 250);
}

async function compare(refusal = "") {
  if (!find("prompt").value) return;
  if (running) running.abort();
  running = new AbortController();
  const mine = running;
  const asked = [...changes];
  say("Computing …");
  try {
    const both = await ask("compare", { prompt: find("prompt").value, changes: sent(asked) }, mine.signal);
    find("save-compared").hidden = false;
    find("save-compared").href = `${both.page}?save`;
    find("compared").replaceChildren(...["before", "after"].map((side) => shown(both[side], side === "before" ? "Original" : "Modified", side)));
    for (const change of asked) change.accepted = true;
    if (JSON.stringify(sent(asked)) !== lookedAt) await look();
    if (refusal) say(refusal);
    else if (find("said").textContent === "Computing …") say("");
  } catch (error) {
    if (error.name === "AbortError") return;
    say(error.message);
    // A change that is refused leaves the list: the newest of those that have never been computed.
    const newest = error.refused ? asked.findLast((change) => !change.accepted) : undefined;
    if (!newest) return;
    changes.splice(changes.indexOf(newest), 1);
    list();
    if (changes.some((change) => !change.accepted)) compare(error.message);
  }
}

function shown(side, caption, name) {
  const rows = side.tokens.map(([text, probability], i) => [String(i + 1), token(text), percent(probability)]);
  return element("section", { "data-side": name }, table(["rank", "token", "probability"], rows, { caption }), element("p", {}, "Continuation: ", element("bdi", { class: "token continuation" }, side.continuation)));
}

function list() {
  find("changes").replaceChildren(
    ...(changes.length ? [] : [element("li", {}, `No changes. Choose a type, enter a target such as ${kinds.get(data.kinds[0].kind).example}, and press Add.`)]),
    ...changes.map((change, at) => {
      const label = `${kinds.get(change.kind).name} ${change.target}`;
      const shownValue = element("output", {}, String(change.value));
      const slider = element("input", { type: "range", min: "-30", max: "30", step: "0.5", value: change.value, "aria-label": label, oninput: (event) => {
        change.value = Number(event.target.value);
        shownValue.textContent = event.target.value;
        compareSoon();
      } });
      return element("li", { class: "bar" }, label, " ", ...(change.kind === "value" ? [slider, shownValue] : []), element("button", { type: "button", "aria-label": `remove ${label}`, onclick: () => {
        changes.splice(at, 1);
        list();
        compareSoon();
      } }, "×"));
    }),
  );
}

// What there are maps for is offered by name.
function offer() {
  const { known, example } = kinds.get(find("kind").value);
  find("known").replaceChildren(...known.map((target) => element("option", { value: target })));
  find("target").placeholder = known.length ? known[0] : example;
}

choose(find("kind"), data.kinds.map(({ kind, name }) => [kind, name]), data.kinds[0].kind);
offer();
list();
find("kind").addEventListener("change", offer);
find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!find("prompt").value) {
    say(NO_PROMPT);
    return;
  }
  look().then(compareSoon);
});
window.addEventListener("message", (event) => {
  if (event.source === find("page").contentWindow) view = event.data.view;
});
find("add").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!find("target").value.trim()) {
    say(`Enter a target, such as ${find("target").placeholder}.`);
    return;
  }
  if (!find("prompt").value) {
    say(NO_PROMPT);
    return;
  }
  changes.push({ kind: find("kind").value, target: find("target").value.trim(), value: data.coefficient });
  find("target").value = "";
  list();
  compareSoon();
});
followTheme(find("theme"));
document.documentElement.dataset.ready = "";
