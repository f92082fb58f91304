// A timeline in rows. Kinds of spans differ in the height of their bars, not only in colour.

import { clock, element, ifChanged } from "./dom.js";

const AXIS_PX = 18;
// The name of each kind of span, its colour, and its share of the height of a row.
const KINDS = {
  unavailable: ["no spot", "--line", 1],
  spot: ["spot", "--blue", 0.4],
  on_demand: ["on-demand", "--vermillion", 0.8],
  F: ["forward", "--orange", 0.5],
  B: ["backward", "--green", 0.8],
  FB: ["both", "--blue", 0.8],
};

function key(text, color, share) {
  const bar = element("span");
  Object.assign(bar.style, { background: `var(${color})`, height: `${14 * share}px` });
  return [bar, text];
}

export class Timeline {
  constructor(place) {
    this.place = place;
    this.canvas = element("canvas");
    this.keys = element("p", "", "keys");
    place.append(this.canvas);
    place.after(this.keys);
    new ResizeObserver(() => this.draw()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // Rows: [label, [[from, to, kind, text], ...]]; `to` is -1 if the span has not ended.
  render(rows, end) {
    [this.rows, this.end] = [rows, end];
    const shown = new Set(rows.flatMap(([, spans]) => spans.map(([, , kind]) => kind)));
    ifChanged(this.keys, [...shown], () => this.keys.replaceChildren(...Object.entries(KINDS).filter(([kind]) => shown.has(kind)).flatMap(([, kind]) => key(...kind))));
    this.draw();
  }

  draw() {
    const { rows } = this;
    if (!rows) return;
    const ratio = devicePixelRatio || 1;
    const width = Math.max(80, this.place.clientWidth);
    const row = Math.min(22, Math.max(3, (this.place.clientHeight - AXIS_PX) / Math.max(1, rows.length))); // of 1,000 it scrolls
    const height = row * rows.length + AXIS_PX;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const css = getComputedStyle(document.documentElement);
    const left = 8 + 6.5 * Math.max(...rows.map(([label]) => label.length), 2);
    const color = (name) => css.getPropertyValue(name).trim();
    const end = this.end || 1;
    const x = (seconds) => left + ((width - left - 4) * Math.min(seconds, end)) / end;
    pen.font = "11px system-ui, sans-serif";
    rows.forEach(([label, spans], slot) => {
      const top = row * slot;
      pen.fillStyle = color("--line");
      pen.fillRect(left, top + row / 2, width - left - 4, 1);
      for (const [from, to, kind, text] of spans) {
        const [, name, share] = KINDS[kind];
        pen.fillStyle = color(name);
        const long = Math.max(1, x(to < 0 ? end : to) - x(from));
        pen.fillRect(x(from), top + (row * (1 - share)) / 2, long, row * share);
        if (!text || long < 8 * text.length) continue;
        pen.fillStyle = color("--card");
        pen.textBaseline = "middle";
        pen.fillText(text, x(from) + (long - 6 * text.length) / 2, top + row / 2);
      }
      if (row >= 12 || slot % Math.ceil(12 / row) === 0) {
        pen.fillStyle = color("--dim");
        pen.textBaseline = "middle";
        pen.fillText(label, 0, top + row / 2);
      }
    });
    pen.fillStyle = color("--dim");
    pen.textBaseline = "bottom";
    pen.textAlign = "left";
    pen.fillText("0 s", left, height);
    pen.textAlign = "right";
    pen.fillText(end < 10 ? `${+end.toPrecision(3)} s` : clock(end), width - 4, height);
  }
}
