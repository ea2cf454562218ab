// The page of a prompt: layers by tokens, one lens or two, and what made each cell.
import { pageData, unpack, unpackAll } from "./decoding.js";
import { choose, element, find, followTheme, number, percent, table, token, whole } from "./elements.js";
import { rankCurves } from "./curves.js";

const data = pageData();
const ids = unpack(data.ids).values;
const prompt = unpack(data.tokens).values;
const followed = Array.from(unpack(data.followed).values);
const lenses = data.lenses.map(unpackAll);
const updates = data.updates && unpackAll(data.updates);
const layers = data.layers;
const [nLayers, nTokens, nBest] = lenses[0].ids.shape;
const PINS = 8, STEPS = 16;
const NO_PINS = "No pinned tokens. Choose one under Pin, or press p on a cell, to see its rank here.";
const text = (place) => data.texts[place];
const shown = {
  lens: 0, other: data.compared, view: "grid", color: "probability", row: nLayers - 1, column: nTokens - 1,
  pins: data.pinned.slice(0, PINS),
};

// What a lens says of a cell

// A modified model may skip a layer.
const skips = (lens, row) => Number.isNaN(lens.kl.at(row, 0));
const top = (lens, row, column) => (skips(lens, row) ? "\u00a0" : text(lens.ids.at(row, column, 0)));

const MEASURES = {
  probability: { name: "probability of the top token", of: (lens, r, c) => Math.exp(lens.log_probs.at(r, c, 0)), text: percent, scale: () => [0, 1] },
  entropy: { name: "entropy (nats)", of: (lens, r, c) => lens.entropy.at(r, c), text: number, scale: usual("entropy"), open: true },
  kl: { name: "KL to the end (nats)", of: (lens, r, c) => lens.kl.at(r, c), text: number, scale: usual("kl"), open: true },
  rank: { name: "rank of the final prediction", of: (lens, r, c) => lens.rank.at(r, c) || NaN, text: whole, logarithmic: true, scale: largest("rank") },
};

function largest(key) {
  return () => [key === "rank" ? 1 : 0, Math.max(...lenses.map((lens) => lens[key].values.reduce((most, value) => Math.max(most, value), 0)))];
}

// Up to where nineteen cells of twenty lie: a few cells far out would leave all others pale.
function usual(key) {
  return () => {
    const values = lenses.flatMap((lens) => Array.from(lens[key].values)).filter(Number.isFinite).sort((a, b) => a - b);
    return [0, values[Math.floor(0.95 * (values.length - 1))]];
  };
}

function rankOf(lens, row, column, place) {
  const known = followed.indexOf(place);
  if (skips(lens, row)) return NaN;
  if (known >= 0) return lens.followed_ranks.at(row, column, known);
  for (let k = 0; k < nBest; k++) if (lens.ids.at(row, column, k) === place) return k + 1;
  return NaN;
}

function logProbOf(lens, row, column, place) {
  const known = followed.indexOf(place);
  if (known >= 0) return lens.followed_log_probs.at(row, column, known);
  for (let k = 0; k < nBest; k++) if (lens.ids.at(row, column, k) === place) return lens.log_probs.at(row, column, k);
  return NaN;
}

function measure() {
  if (!shown.color.startsWith("pin")) return MEASURES[shown.color];
  const place = placeOf(Number(shown.color.slice(3)));
  return { name: `rank of ${text(place)}`, of: (lens, r, c) => rankOf(lens, r, c, place), text: (value) => (Number.isFinite(value) ? whole(value) : `>${nBest}`), logarithmic: true, scale: largest("rank") };
}

function placeOf(id) {
  let low = 0, high = ids.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ids[middle] < id) low = middle + 1;
    else high = middle;
  }
  return ids[low] === id ? low : -1;
}

// The grids

let grids = [];

function build() {
  const other = lenses[shown.other];
  const difference = shown.view === "difference" && other;
  grids = difference ? [{ first: lenses[shown.lens], second: other }] : [lenses[shown.lens], other].filter(Boolean).map((lens) => ({ first: lens }));
  find("grids").replaceChildren(...grids.map(grid));
  find("grids").className = grids.length > 1 ? "columns" : "";
  find("stage").classList.toggle("two", shown.other >= 0);
  paint();
}

function caption({ first, second }) {
  return second ? `${second.name} less ${first.name}` : first.name;
}

function grid(made) {
  const head = element("tr", {}, element("th", { scope: "col" }, "layer"), ...Array.from(prompt, (place) => element("th", { scope: "col" }, token(text(place)))));
  const body = element("tbody");
  made.cells = [];
  const pattern = element("td", { role: "gridcell", tabindex: "-1" }, " ", element("small"));
  for (let row = nLayers - 1; row >= 0; row--) {
    const line = element("tr", {}, element("th", { scope: "row" }, String(layers[row])));
    made.cells[row] = [];
    for (let column = 0; column < nTokens; column++) {
      const cell = pattern.cloneNode(true);
      cell.dataset.row = row;
      cell.dataset.column = column;
      cell.firstChild.data = top(made.first, row, column);
      made.cells[row][column] = cell;
      line.append(cell);
    }
    body.append(line);
  }
  const whole_ = element("table", { role: "grid", "aria-label": `${caption(made)}: layers and tokens` }, element("thead", {}, head), body);
  whole_.addEventListener("click", (event) => chooseAt(event.target));
  whole_.addEventListener("focusin", (event) => chooseAt(event.target));
  whole_.addEventListener("keydown", move);
  whole_.addEventListener("mouseover", (event) => hover(event, made));
  whole_.addEventListener("mouseleave", () => (find("hover").hidden = true));
  const box = element("div", { class: "scroll" }, whole_);
  made.box = box;
  box.addEventListener("scroll", () => {
    for (const same of grids) if (same.box !== box && same.box.scrollLeft !== box.scrollLeft) same.box.scrollLeft = box.scrollLeft;
  }, { passive: true });
  return element("section", {}, element("h2", {}, caption(made)), box);
}

function step(value, [least, most], logarithmic) {
  if (!Number.isFinite(value)) return 0;
  const share = logarithmic ? 1 - Math.log(value) / Math.log(Math.max(most, 2)) : (value - least) / (most - least || 1);
  return Math.round(Math.min(Math.max(share, 0), 1) * (STEPS - 1));
}

function paint() {
  const chosen = measure();
  const scale = chosen.scale();
  for (const { cells, first, second } of grids) {
    const differences = second && cells.map((line, row) => line.map((_, column) => between(chosen, first, second, row, column)));
    const most = second && Math.max(...differences.flat().filter(Number.isFinite).map(Math.abs), 0);
    for (let row = 0; row < nLayers; row++) {
      for (let column = 0; column < nTokens; column++) {
        const cell = cells[row][column];
        const small = cell.lastChild;
        if (second) {
          const value = differences[row][column];
          const size = most ? Math.round((Math.abs(value) / most) * (STEPS - 1)) : 0;
          cell.className = Number.isFinite(value) ? `${value < 0 ? "less" : "more"}${size}` : "step0";
          cell.firstChild.data = top(second, row, column);
          small.textContent = chosen.logarithmic ? signed(second, first, chosen, row, column) : withSign(value, chosen.text);
        } else {
          cell.className = `step${step(chosen.of(first, row, column), scale, chosen.logarithmic)}`;
          small.textContent = MEASURES.rank.text(MEASURES.rank.of(first, row, column));
        }
        if (grids.length > 1 && top(grids[0].first, row, column) !== top(grids[1].first, row, column)) cell.classList.add("differs");
      }
    }
  }
  const [least, most] = scale;
  find("legend").replaceChildren(
    `Color: ${chosen.name}${shown.view === "difference" && grids[0].second ? ", and how it differs: less, more" : `, ${chosen.text(least)} to ${chosen.text(most)}${chosen.open ? " and more" : ""}`} `,
    element("span", { class: "scale", "aria-hidden": "true" }, ...Array.from({ length: STEPS }, (_, i) => element("i", { class: grids[0].second ? (i < STEPS / 2 ? `less${STEPS - 1 - 2 * i}` : `more${2 * i - STEPS + 1}`) : `step${chosen.logarithmic ? STEPS - 1 - i : i}` }))),
  );
  mark();
}

function between(chosen, first, second, row, column) {
  const [a, b] = [chosen.of(first, row, column), chosen.of(second, row, column)];
  return chosen.logarithmic ? Math.log(a) - Math.log(b) : b - a;
}

// A smaller rank is a better one, so differences of ranks are told as ratios: ×2 is half as far from the top.
function signed(second, first, chosen, row, column) {
  const [a, b] = [chosen.of(first, row, column), chosen.of(second, row, column)];
  return Number.isFinite(a) && Number.isFinite(b) ? `${chosen.text(a)}→${chosen.text(b)}` : "–";
}

function withSign(value, write) {
  return value > 0 ? `+${write(value)}` : write(value);
}

let focusable = [];

function mark() {
  for (const cell of focusable) {
    cell.tabIndex = -1;
    cell.removeAttribute("aria-selected");
  }
  focusable = grids.map(({ cells }) => cells[shown.row][shown.column]);
  for (const cell of focusable) {
    cell.tabIndex = 0;
    cell.setAttribute("aria-selected", "true");
  }
}

function chooseAt(target) {
  const cell = target.closest("td[data-row]");
  if (!cell) return;
  const [row, column] = [Number(cell.dataset.row), Number(cell.dataset.column)];
  if (row === shown.row && column === shown.column) return;
  shown.row = row;
  shown.column = column;
  mark();
  open();
}

const MOVES = {
  ArrowLeft: () => [shown.row, shown.column - 1],
  ArrowRight: () => [shown.row, shown.column + 1],
  ArrowUp: () => [shown.row + 1, shown.column],
  ArrowDown: () => [shown.row - 1, shown.column],
  Home: () => [shown.row, 0],
  End: () => [shown.row, nTokens - 1],
  PageUp: () => [nLayers - 1, shown.column],
  PageDown: () => [0, shown.column],
};

function move(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "p") pin(lenses[shown.lens].ids.at(shown.row, shown.column, 0));
  else if (event.key === "l") setLens((shown.lens + 1) % lenses.length, true);
  else if (event.key in MOVES) {
    const [row, column] = MOVES[event.key]();
    if (row >= 0 && row < nLayers && column >= 0 && column < nTokens) {
      const at = Math.max(grids.findIndex(({ cells }) => cells.flat().includes(event.target)), 0);
      grids[at].cells[row][column].focus();
    }
  } else return;
  event.preventDefault();
}

function hover(event, { first, second }) {
  const cell = event.target.closest("td[data-row]");
  const box = find("hover");
  box.hidden = !cell;
  if (!cell) return;
  const [row, column] = [Number(cell.dataset.row), Number(cell.dataset.column)];
  const lens = second || first;
  box.replaceChildren(
    element("b", {}, `${lens.name}, layer ${layers[row]}`),
    ...Array.from({ length: skips(lens, row) ? 0 : Math.min(5, nBest) }, (_, k) => element("div", {}, token(text(lens.ids.at(row, column, k))), ` ${percent(Math.exp(lens.log_probs.at(row, column, k)))}`)),
  );
  const place = cell.getBoundingClientRect();
  box.style.left = `${Math.max(Math.min(place.right + 6, document.documentElement.clientWidth - 190), 4)}px`;
  box.style.top = `${Math.max(Math.min(place.top, window.innerHeight - 140), 4)}px`;
}

// The chosen cell

function open() {
  const { row, column } = shown;
  find("cell-title").replaceChildren(`Layer ${layers[row]}, token ${column} `, token(text(prompt[column])));
  const chosen = [shown.lens, shown.other].filter((i) => i >= 0);
  find("cell-body").replaceChildren(...chosen.map((i) => best(lenses[i], row, column)));
  if (chosen.length > 1) find("cell-body").append(comparison(...chosen.map((i) => lenses[i]), row, column));
  drawCurves();
  openUpdates();
  openTable();
  keep();
}

function best(lens, row, column) {
  const rows = Array.from({ length: skips(lens, row) ? 0 : nBest }, (_, k) => {
    const place = lens.ids.at(row, column, k);
    return [String(k + 1), token(text(place)), percent(Math.exp(lens.log_probs.at(row, column, k))), pinButton(place)];
  });
  const about = skips(lens, row) ? "this layer is skipped" : `entropy ${number(lens.entropy.at(row, column))}, KL ${number(lens.kl.at(row, column))}, the final prediction has rank ${whole(lens.rank.at(row, column))}`;
  return element("div", { class: "best", "data-lens": lens.name }, table(["rank", "token", "probability", "pin"], rows, { caption: `${lens.name}: ${about}` }));
}

function comparison(first, second, row, column) {
  const rows = Object.values(MEASURES).map((chosen) => {
    const [a, b] = [chosen.of(first, row, column), chosen.of(second, row, column)];
    return [chosen.name, chosen.text(a), chosen.text(b), withSign(b - a, chosen.text)];
  });
  for (const place of shown.pins) {
    const [a, b] = [rankOf(first, row, column, place), rankOf(second, row, column, place)];
    rows.push([element("span", {}, "rank of ", token(text(place))), ...[first, second].map((lens) => pinned(lens, row, column, place)), Number.isFinite(b - a) ? withSign(b - a, whole) : "–"]);
  }
  return element("div", { class: "comparison" }, table(["", first.name, second.name, "difference"], rows, { caption: "Both" }));
}

function orMore(rank) {
  return Number.isFinite(rank) ? whole(rank) : `>${nBest}`;
}

function pinned(lens, row, column, place) {
  return skips(lens, row) ? "–" : orMore(rankOf(lens, row, column, place));
}

function pinButton(place) {
  const pinned = shown.pins.includes(place);
  return element("button", { type: "button", "aria-pressed": String(pinned), "data-place": place, "aria-label": `pin ${text(place)}`, onclick: () => pin(place) }, pinned ? "pinned" : "pin");
}

// Sub-updates

function openUpdates() {
  const ffn = layers[shown.row] - 1;
  find("updates").hidden = !updates;
  if (!updates) return;
  if (ffn < 0) {
    find("updates-about").textContent = "Layer 0 is the embedding, before the first FFN.";
    find("updates-body").replaceChildren();
    return;
  }
  const { column } = shown;
  const pins = shown.pins.filter((place) => followed.includes(place));
  const at = pins.map((place) => followed.indexOf(place));
  const scale = updates.scale.at(ffn, column);
  const n = updates.way.shape[2];
  const sums = at.map(() => 0);
  let share = 0;
  const rows = Array.from({ length: n }, (_, k) => {
    const way = updates.way.at(ffn, column, k);
    const coefficient = updates.coefficient.at(ffn, column, k);
    const part = updates.share.at(ffn, column, k);
    share += part;
    const effects = at.map((place, i) => {
      const effect = scale * Math.abs(coefficient) * updates.static.at(way, place) * updates.step.at(way);
      sums[i] += effect;
      return number(effect);
    });
    const promoted = element("span", {}, ...Array.from({ length: updates.promoted.shape[1] }, (_, i) => token(text(updates.promoted.at(way, i)))).flatMap((made) => [made, " "]));
    return [`L${updates.layer.at(way)}D${updates.index.at(way)}`, number(coefficient), percent(part), promoted, ...effects];
  });
  const rest = at.map((place) => updates.rest.at(ffn, column, place));
  const bias = at.map((place) => scale * updates.bias.at(ffn, place));
  const foot = [
    [`the other ${whole(updates.d_mlp - n)}`, "", percent(1 - share), "", ...rest.map(number)],
    ...(bias.some((value) => value !== 0) ? [["bias", "", "", "", ...bias.map(number)]] : []),
    ["FFN output", "", percent(1), "", ...sums.map((sum, i) => number(sum + rest[i] + bias[i]))],
  ];
  const without = shown.pins.length - pins.length;
  find("updates-about").replaceChildren(
    `What the FFN of block ${ffn} adds to the residual stream at token ${column}: its ${n} largest sub-updates, the tokens each promotes, and its effect on the scores of pinned tokens${without ? ` (${without} of them ${without > 1 ? "are" : "is"} not followed here)` : ""}.`,
  );
  const heads = ["value vector", "coefficient", "share", "promoted by the sub-update", ...pins.map((place) => element("span", {}, "on ", token(text(place))))];
  find("updates-body").replaceChildren(table(heads, rows, { foot }));
}

// Pins and curves

function pin(place) {
  const at = shown.pins.indexOf(place);
  if (at >= 0) shown.pins.splice(at, 1);
  else if (place >= 0) shown.pins = [...shown.pins, place].slice(-PINS);
  refresh();
}

function listPins() {
  find("pins").replaceChildren(
    ...(shown.pins.length ? [] : [element("li", {}, "none")]),
    ...shown.pins.map((place, i) => element("li", {}, element("i", { class: `key line${i}`, "aria-hidden": "true" }), token(text(place)), element("button", { type: "button", "aria-label": `unpin ${text(place)}`, onclick: () => pin(place) }, "×"))),
  );
  choose(find("add"), [["", "a token …"], ...followed.filter((place) => !shown.pins.includes(place)).map((place) => [String(place), text(place)])], "");
  const colors = [...Object.entries(MEASURES).map(([key, { name }]) => [key, name]), ...shown.pins.map((place) => [`pin${ids[place]}`, `rank of ${text(place)}`])];
  if (!colors.some(([key]) => key === shown.color)) shown.color = "probability";
  choose(find("color"), colors, shown.color);
}

function drawCurves() {
  const chosen = [shown.lens, shown.other].filter((i) => i >= 0);
  const series = (ranks) => chosen.flatMap((i, dashed) => shown.pins.map((place, line) => ({ line, dashed: dashed > 0, ranks: ranks(lenses[i], place) })));
  const most = largest("rank")()[1];
  const names = chosen.map((i, dashed) => `${lenses[i].name}${dashed ? " dashed" : ""}`).join(", ");
  const overLayers = rankCurves({
    title: `Over layers, at token ${shown.column} (${names})`, axis: "layer", labels: layers.map(String), marked: shown.row, most,
    series: series((lens, place) => layers.map((_, row) => rankOf(lens, row, shown.column, place))),
    pick: (row) => go(row, shown.column),
  });
  const overTokens = rankCurves({
    title: `Over tokens, at layer ${layers[shown.row]} (${names})`, axis: "token", labels: Array.from(prompt, (_, i) => String(i)), marked: shown.column, most,
    series: series((lens, place) => Array.from(prompt, (_, column) => rankOf(lens, shown.row, column, place))),
    pick: (column) => go(shown.row, column),
  });
  find("curves").replaceChildren(...(shown.pins.length ? [overLayers, overTokens] : [element("p", {}, NO_PINS)]));
}

function go(row, column) {
  shown.row = row;
  shown.column = column;
  mark();
  open();
}

// The table of one token: all that the grid says in colors, as numbers

function openTable() {
  const asTable = shown.view === "table";
  find("grids").hidden = find("legend").hidden = asTable;
  find("table").hidden = !asTable;
  if (!asTable) return;
  const chosen = [shown.lens, shown.other].filter((i) => i >= 0).map((i) => lenses[i]);
  const position = element("select", { id: "position", onchange: (event) => go(shown.row, Number(event.target.value)) });
  choose(position, Array.from(prompt, (place, i) => [String(i), `${i} ${text(place)}`]), String(shown.column));
  const tables = chosen.map((lens) => {
    const rows = layers.map((layer, row) => [
      String(layer), token(top(lens, row, shown.column)),
      ...Object.values(MEASURES).map((one) => one.text(one.of(lens, row, shown.column))),
      ...shown.pins.map((place) => `${pinned(lens, row, shown.column, place)} (${percent(Math.exp(logProbOf(lens, row, shown.column, place)))})`),
    ]).reverse();
    const heads = ["layer", "top token", "probability", "entropy", "KL", "rank of the final prediction", ...shown.pins.map((place) => element("span", {}, "rank of ", token(text(place)), " (probability)"))];
    return element("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": `Table of ${lens.name}` }, table(heads, rows, { caption: lens.name }));
  });
  const focused = document.activeElement && document.activeElement.id === "position";
  find("table").replaceChildren(element("p", {}, element("label", {}, "Token ", position)), ...tables);
  if (focused) position.focus();
}

// State, which is also the fragment of the address

function setLens(lens, focus = false) {
  shown.lens = lens;
  if (shown.other === lens) shown.other = -1;
  refresh(true);
  if (focus && shown.view !== "table") grids[0].cells[shown.row][shown.column].focus();
}

function keep() {
  const parts = new URLSearchParams({ lens: lenses[shown.lens].name });
  if (shown.other >= 0) parts.set("compare", lenses[shown.other].name);
  parts.set("view", shown.view);
  parts.set("color", shown.color);
  parts.set("cell", `${layers[shown.row]},${shown.column}`);
  parts.set("pins", shown.pins.map((place) => ids[place]).join(","));
  try {
    history.replaceState(null, "", `#${parts}`);
  } catch {
    // A page inside another may have no address of its own.
  }
  if (parent !== window) parent.postMessage({ view: String(parts) }, "*"); // the live page shows the next page like this
}

function recall() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const named = (key) => lenses.findIndex(({ name }) => name === parts.get(key));
  if (named("lens") >= 0) shown.lens = named("lens");
  if (parts.has("lens")) shown.other = named("compare") === shown.lens ? -1 : named("compare");
  if (["grid", "difference", "table"].includes(parts.get("view"))) shown.view = parts.get("view");
  const [layer, column] = (parts.get("cell") || "-1,-1").split(",").map(Number);
  if (layers.includes(layer)) shown.row = layers.indexOf(layer);
  if (Number.isInteger(column) && column >= 0 && column < nTokens) shown.column = column;
  if (parts.has("pins")) shown.pins = parts.get("pins").split(",").filter(Boolean).map((id) => placeOf(Number(id))).filter((place) => place >= 0).slice(0, PINS);
  const color = parts.get("color") || "";
  if (color in MEASURES || /^pin\d+$/.test(color)) shown.color = color;
}

function refresh(rebuild = false) {
  choose(find("lens"), lenses.map(({ name }, i) => [String(i), name]), String(shown.lens));
  choose(find("other"), [["-1", "none"], ...lenses.map(({ name }, i) => [String(i), name]).filter(([i]) => Number(i) !== shown.lens)], String(shown.other));
  if (shown.view === "difference" && shown.other < 0) shown.view = "grid";
  find("view").querySelector('[value="difference"]').disabled = shown.other < 0;
  find("view").value = shown.view;
  const focused = document.activeElement && document.activeElement.dataset.place;
  listPins();
  if (rebuild) build();
  else paint();
  open();
  const same = focused && find("cell-body").querySelector(`[data-place="${focused}"]`);
  if (same) same.focus();
}

find("prompt").textContent = data.prompt;
find("controls").addEventListener("submit", (event) => event.preventDefault());
find("lens").addEventListener("change", (event) => setLens(Number(event.target.value)));
find("other").addEventListener("change", (event) => {
  shown.other = Number(event.target.value);
  refresh(true);
});
find("color").addEventListener("change", (event) => {
  shown.color = event.target.value;
  refresh();
});
find("view").addEventListener("change", (event) => {
  shown.view = event.target.value;
  refresh(true);
});
find("add").addEventListener("change", (event) => event.target.value && pin(Number(event.target.value)));
followTheme(find("theme"));
window.addEventListener("hashchange", () => {
  recall();
  refresh(true);
});
recall();
const linked = location.hash.includes("cell=");
refresh(true);
// Without a cell in the address a page opens at the first column, also where the grid is wider than the screen.
if (linked) {
  for (const { cells } of grids) cells[shown.row][shown.column].scrollIntoView({ block: "nearest", inline: "nearest" });
}
performance.measure("ready", { start: 0 });
document.documentElement.dataset.ready = "";
