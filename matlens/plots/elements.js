// Elements and numbers. All text goes in as text, never as markup.

export const find = (name) => document.getElementById(name);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  return filled(made, attributes, children);
}

export function drawing(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

// A token in an element of its own: what is written from right to left turns nothing around it.
export function token(text) {
  return element("bdi", { class: "token" }, text);
}

export function number(value) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(3).replace("-", "−").replace("e−", "e-").replace("e+", "e");
  return value.toPrecision(4).replace("-", "−");
}

export function whole(value) {
  return Number.isFinite(value) ? value.toLocaleString("en") : "–";
}

export function percent(value) {
  return Number.isFinite(value) ? `${number(100 * value)}%` : "–";
}

export function table(heads, rows, { caption = null, foot = [] } = {}) {
  const cells = (row) =>
    element("tr", {}, ...row.map((cell, i) => (i === 0 ? element("th", { scope: "row" }, cell) : element("td", {}, cell))));
  return element(
    "table",
    {},
    caption === null ? null : element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, ...rows.map(cells)),
    foot.length ? element("tfoot", {}, ...foot.map(cells)) : null,
  );
}

export function choose(select, options, chosen) {
  select.replaceChildren(...options.map(([value, text]) => element("option", { value, selected: value === chosen }, text)));
  select.value = chosen;
}

// Light or dark: as the system has it, unless somebody chooses.
export function followTheme(select) {
  select.addEventListener("change", () => {
    if (select.value) document.documentElement.dataset.theme = select.value;
    else delete document.documentElement.dataset.theme;
  });
}
