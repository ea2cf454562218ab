// The page of all value vectors: finding them, and showing one.
import { pageData, unpack, unpackAll } from "./decoding.js";
import { element, find, followTheme, number, percent, table, token, whole } from "./elements.js";
import { bring } from "./shards.js";

const data = pageData();
const total = data.nLayers * data.dMlp;
const MOST = 60;
const STEPS = 16;
const EXAMPLE = "Type a word such as wine, a value vector such as L3D12, or layer 3; or press Any vector.";
let texts = [];
let summary = null;

const nameOf = (row) => `L${Math.floor(row / data.dMlp)}D${row % data.dMlp}`;
const say = (text) => (find("said").textContent = text);

function link(fragment, ...children) {
  return element("a", { href: `#${fragment}` }, ...children);
}

function tokens(places) {
  return element("span", {}, ...Array.from(places).flatMap((place) => [token(texts[place]), " "]));
}

// Lists of value vectors

function list(rows, title) {
  const shown = rows.slice(0, MOST);
  const heads = ["value vector", "top tokens", ...(data.nClusters ? ["cluster"] : []), ...(data.corpus ? ["dominant at"] : [])];
  const lines = shown.map((row) => [
    link(nameOf(row), nameOf(row)),
    tokens(summary.top.values.subarray(row * summary.top.shape[1], (row + 1) * summary.top.shape[1])),
    ...(data.nClusters ? [link(`cluster=${summary.cluster.at(row)}`, whole(summary.cluster.at(row)))] : []),
    ...(data.corpus ? [percent(summary.dominant.at(row))] : []),
  ]);
  say(`${title}: ${whole(rows.length)} value vectors${rows.length > MOST ? `, the first ${MOST}` : ""}.`);
  find("results").replaceChildren(element("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": title }, table(heads, lines)));
}

async function ofToken(place) {
  const part = unpackAll(await bring(`tokens-${Math.floor(place / data.tokens)}`));
  const at = place % data.tokens;
  const rows = Array.from(part.rows.values.subarray(part.starts.at(at), part.starts.at(at + 1)));
  list(rows, `With ${texts[place]} in their ${data.top_k} top tokens`);
}

function ofWord(word) {
  const wanted = word.replace(/^␣/, " ").toLowerCase();
  const bare = wanted.trim();
  const matches = [];
  texts.forEach((text, place) => {
    const plain = text.replace(/^␣/, " ").toLowerCase();
    if (plain.includes(bare)) matches.push([plain === wanted ? 0 : plain.trim() === bare ? 1 : plain.trim().startsWith(bare) ? 2 : 3, plain.length, place]);
  });
  matches.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  const exact = matches.filter(([how]) => how < 2);
  say(matches.length ? `${whole(matches.length)} tokens contain ${word}.` : `No tokens contain ${word}. ${EXAMPLE}`);
  find("results").replaceChildren(
    element("ul", { class: "choices" }, ...matches.slice(0, MOST).map(([, , place]) => element("li", {}, link(`token=${place}`, token(texts[place]))))),
  );
  return exact.length ? exact[0][2] : null;
}

function ofLayer(layer) {
  list(Array.from({ length: data.dMlp }, (_, i) => layer * data.dMlp + i), `Layer ${layer}`);
}

function ofCluster(cluster) {
  const rows = [];
  summary.cluster.values.forEach((label, row) => label === cluster && rows.push(row));
  list(rows, `Cluster ${cluster}`);
}

// One value vector

async function show(row) {
  const layer = Math.floor(row / data.dMlp), index = row % data.dMlp;
  const block = Math.floor(index / data.block), at = index % data.block;
  const part = await bring(`vectors-${layer}-${block}`);
  const numbers = unpackAll(part);
  const facts = [
    `norm ${number(numbers.norms.at(at))}`,
    ...(numbers.dominant ? [`dominant at ${percent(numbers.dominant.at(at))} of tokens`] : []),
  ].join(", ");
  const steps = [row - 1, row + 1].map((other, i) => (other >= 0 && other < total ? link(nameOf(other), i ? `${nameOf(other)} →` : `← ${nameOf(other)}`) : null));
  const lists = part.lists.map(({ reading, side, ...packed }) => {
    const { ids, scores } = unpackAll(packed);
    const lines = Array.from({ length: ids.shape[1] }, (_, k) => [String(k + 1), link(`token=${ids.at(at, k)}`, token(texts[ids.at(at, k)])), number(scores.at(at, k))]);
    const caption = `${side === "top" ? "Promotes" : "Demotes"}${reading === "norm" ? ", through the norm" : ""}`;
    return element("div", { "data-list": `${reading} ${side}` }, table(["rank", "token", "score"], lines, { caption }));
  });
  const near = Array.from({ length: numbers.neighbors.shape[1] }, (_, k) => {
    const other = numbers.neighbors.at(at, k);
    return [link(nameOf(other), nameOf(other)), number(numbers.cosines.at(at, k)), tokens(summary.top.values.subarray(other * summary.top.shape[1], (other + 1) * summary.top.shape[1]))];
  });
  const sentences = numbers.sentences ? await examples(numbers, at) : null;
  find("vector").replaceChildren(
    element("h2", { id: "vector-name", tabindex: "-1" }, nameOf(row)),
    element("p", {}, facts, data.nClusters ? element("span", {}, ", ", link(`cluster=${summary.cluster.at(row)}`, `cluster ${summary.cluster.at(row)}`)) : ""),
    element("p", { class: "bar" }, ...steps.filter(Boolean)),
    element("div", { class: "columns" }, ...lists, ...(near.length ? [element("div", { "data-list": "neighbors" }, table(["neighbor", "cosine", "promotes"], near, { caption: "Neighbors" }))] : [])),
    ...(sentences ? [element("h2", {}, "Sentences with its largest coefficients"), ...sentences] : []),
  );
  find("results").replaceChildren();
  say("");
  document.title = `${nameOf(row)} · ${data.model}`;
  find("vector-name").focus({ preventScroll: true });
}

async function examples(numbers, at) {
  const made = [];
  let from = numbers.starts.at(at);
  for (let k = 0; k < numbers.sentences.shape[1]; k++) {
    const sentence = numbers.sentences.at(at, k) - 1;
    if (sentence < 0) continue;
    const part = unpackAll(await bring(`sentences-${Math.floor(sentence / data.sentences)}`));
    const place = sentence % data.sentences;
    const words = part.tokens.values.subarray(part.starts.at(place), part.starts.at(place + 1));
    const peak = numbers.peaks.at(at, k);
    const spans = Array.from(words, (word, i) => {
      const steps = numbers.coefficients.at(from + i) - 128;
      const value = (steps / 127) * Math.abs(peak);
      const color = `${steps < 0 ? "less" : "more"}${Math.round((Math.abs(steps) / 127) * (STEPS - 1))}`;
      return element("bdi", { class: `word ${color}`, title: number(value), "data-steps": String(steps) }, texts[word].replace(/^␣/, " "));
    });
    from += words.length;
    made.push(element("p", { class: "sentence" }, element("b", { class: "peak" }, number(peak)), " ", ...spans));
  }
  return made;
}

// The address says what is shown

async function route() {
  const fragment = decodeURIComponent(location.hash.slice(1));
  const [key, value] = fragment.split(/=(.*)/s);
  const name = /^L(\d{1,9})D(\d{1,9})$/i.exec(fragment);
  find("vector").replaceChildren();
  find("results").replaceChildren();
  if (name && Number(name[1]) < data.nLayers && Number(name[2]) < data.dMlp) await show(Number(name[1]) * data.dMlp + Number(name[2]));
  else if (key === "token" && Number(value) >= 0 && Number(value) < texts.length) await ofToken(Math.floor(Number(value)));
  else if (key === "layer" && Number(value) >= 0 && Number(value) < data.nLayers) ofLayer(Math.floor(Number(value)));
  else if (key === "cluster" && data.nClusters) ofCluster(Number(value));
  else if (key === "word" && value) ofWord(value);
  else say(fragment ? `Nothing found for ${fragment}. Search for a word, L0D0 to ${nameOf(total - 1)}, a layer or a cluster.` : EXAMPLE);
}

function search(text) {
  const numbered = /^(layer|cluster)\s*(\d{1,9})$/i.exec(text.trim());
  if (/^L\d+D\d+$/i.test(text.trim())) location.hash = text.trim().toUpperCase();
  else if (numbered) location.hash = `${numbered[1].toLowerCase()}=${numbered[2]}`;
  else if (text.trim()) location.hash = `word=${encodeURIComponent(text)}`;
}

async function start() {
  const parts = unpackAll(await bring("summary"));
  const words = await bring("vocabulary");
  texts = words;
  summary = parts;
  await route();
  performance.measure("ready", { start: 0 });
  document.documentElement.dataset.ready = "";
}

followTheme(find("theme"));
find("search").addEventListener("submit", (event) => {
  event.preventDefault();
  search(find("query").value);
});
find("any").addEventListener("click", () => (location.hash = nameOf(Math.floor(Math.random() * total))));
window.addEventListener("hashchange", () => route().catch((error) => say(error.message)));
start().catch((error) => {
  say(`${error.message} Keep this page in the folder it was written to.`);
  document.documentElement.dataset.ready = "";
});
