// Ranks of tokens as curves: rank 1 on top, on a logarithmic scale.
import { drawing, element, whole } from "./elements.js";

const WIDTH = 520, HEIGHT = 230, LEFT = 52, RIGHT = 12, TOP = 12, BOTTOM = 34;

export function rankCurves({ title, axis, labels, series, marked, most, pick }) {
  const last = Math.max(labels.length - 1, 1);
  const x = (i) => LEFT + (i / last) * (WIDTH - LEFT - RIGHT);
  const decades = Math.max(Math.ceil(Math.log10(Math.max(most, 10))), 1);
  const y = (rank) => TOP + (Math.log10(rank) / decades) * (HEIGHT - TOP - BOTTOM);
  const svg = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}. The table of one token lists these ranks.` });
  for (let decade = 0; decade <= decades; decade++) {
    const height = y(10 ** decade);
    svg.append(
      drawing("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: height, y2: height, class: "rule" }),
      drawing("text", { x: LEFT - 6, y: height + 4, class: "tick end" }, whole(10 ** decade)),
    );
  }
  const every = Math.ceil(labels.length / 12);
  labels.forEach((label, i) => {
    if (i % every === 0 || i === labels.length - 1) svg.append(drawing("text", { x: x(i), y: HEIGHT - 18, class: "tick middle" }, label));
  });
  svg.append(drawing("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, class: "tick middle" }, axis));
  svg.append(drawing("line", { x1: x(marked), x2: x(marked), y1: TOP, y2: HEIGHT - BOTTOM, class: "marked" }));
  for (const { ranks, line, dashed } of series) {
    let path = "";
    let pen = false;
    ranks.forEach((rank, i) => {
      if (rank > 0) {
        path += `${pen ? "L" : "M"}${x(i).toFixed(1)} ${y(rank).toFixed(1)}`;
        if (!(ranks[i - 1] > 0) && !(ranks[i + 1] > 0)) svg.append(drawing("circle", { cx: x(i), cy: y(rank), r: 2.5, class: `dot line${line}` }));
      }
      pen = rank > 0;
    });
    svg.append(drawing("path", { d: path, class: `curve line${line}${dashed ? " dashed" : ""}` }));
  }
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * WIDTH;
    pick(Math.min(Math.max(Math.round(((place - LEFT) / (WIDTH - LEFT - RIGHT)) * last), 0), labels.length - 1));
  });
  return element("figure", {}, element("figcaption", {}, title), svg);
}
