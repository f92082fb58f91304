// Curves: error, samples, costs and prices over time. uPlot draws them; lines differ in dashes, not only in colour.

import { clock } from "./dom.js";

export const points = (curve) => {
  const rows = Object.values(curve ?? {}).sort((a, b) => a[0] - b[0]);
  return [rows.map((row) => row[0]), rows.map((row) => row[1])];
};

const number = (value) =>
  Math.abs(value) >= 1e6 ? `${+(value / 1e6).toPrecision(3)} M` : Math.abs(value) >= 1e4 ? `${+(value / 1e3).toPrecision(3)} k` : `${+value.toPrecision(4)}`;

export class Chart {
  constructor(place) {
    this.isTime = true;
    this.place = place;
    new ResizeObserver(() => this.resize()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(true));
  }

  // Lines: {label, curve: [x, y], color (a CSS variable), dash, points}.
  show(lines, ranges) {
    this.lines = lines.filter((line) => line.curve[0].length);
    this.ranges = ranges;
    this.draw(false);
  }

  draw(always) {
    if (!this.lines) return;
    const shape = this.lines.map((line) => line.label).join();
    if (always || !this.plot || shape !== this.shape) this.create();
    else this.plot.setData(this.data());
    this.shape = shape;
  }

  data() {
    return this.lines.length ? uPlot.join(this.lines.map((line) => line.curve)) : [[], []];
  }

  create() {
    this.plot?.destroy();
    const css = getComputedStyle(document.documentElement);
    const color = (name) => css.getPropertyValue(name).trim();
    const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
    const named = (at) => (this.labels ? { label: this.labels[at], labelSize: 16, labelGap: 0, labelFont: "11px system-ui, sans-serif" } : {});
    const series = this.lines.map((line) => ({
      label: line.label, stroke: color(line.color), width: 2, dash: line.dash, spanGaps: true, points: { show: !!line.points, size: line.curve[0].length > 1 ? 4 : 9 },
      paths: line.paths, fill: line.isFilled ? color(line.color) : undefined,
    }));
    const options = {
      width: Math.max(80, this.place.clientWidth), height: this.height(),
      scales: { x: { time: false, range: (u, min, max) => this.ranges.x(min, max) }, y: { range: (u, min, max) => this.ranges.y(min, max) } },
      axes: [
        { ...axis, ...named(0), size: 26, space: 60, values: (u, values) => values.map(this.isTime ? clock : number) },
        { ...axis, ...named(1), size: 46, values: (u, values) => values.map(number) },
      ],
      legend: { live: false, show: series.length > 0 }, cursor: { drag: { x: false, y: false } },
      series: [{}, ...(series.length ? series : [{}])],
    };
    this.plot = new uPlot(options, this.data(), this.place);
    requestAnimationFrame(() => this.resize()); // by then its legend has its height
  }

  height() {
    const legend = this.plot?.root.querySelector(".u-legend"); // below the curves; of many lines it has several rows
    return Math.max(60, this.place.clientHeight - (legend?.offsetHeight || 24));
  }

  resize() {
    this.plot?.setSize({ width: Math.max(80, this.place.clientWidth), height: this.height() });
  }
}

export const wide = (min, max) => (min === max ? [min - 0.5, max + 0.5] : [min, max]);

export const fromZero = { x: (min, max) => [0, Math.max(max ?? 1, 1)], y: (min, max) => [0, 1.05 * (max || 1)] };

export class ErrorChart extends Chart {
  render(curves, measure) {
    const { prequential, held_out: heldOut } = curves[measure];
    const [before, held] = [points(prequential), points(heldOut)];
    const last = Math.max(before[0].at(-1) ?? 0, held[0].at(-1) ?? 0, 1);
    const target = curves.marks[measure];
    const lines = [
      { label: "prequential", curve: before, color: "--blue" },
      { label: "held out", curve: held, color: "--vermillion", dash: [6, 3], points: held[0].length < 40 },
    ];
    if (target !== undefined) lines.push({ label: `target ${target}`, curve: [[0, last], [target, target]], color: "--ink", dash: [2, 3] });
    this.show(lines, {
      x: (min, max) => [0, Math.max(max ?? 1, 1)],
      y: (min, max) => {
        const [low, high] = wide(min ?? 0, max ?? 1);
        const rest = 0.05 * (high - low);
        return [Math.max(low >= 0 ? 0 : -Infinity, low - rest), high + rest];
      },
    });
  }
}

export class SamplesChart extends Chart {
  render(curves) {
    const { deadline_s: deadline, samples: target, per_s: perSecond } = curves.marks;
    const learned = points(curves.samples);
    const lines = [{ label: "learned", curve: learned, color: "--blue" }];
    if (deadline && target) lines.push({ label: "pace needed", curve: [[0, deadline], [0, target]], color: "--vermillion", dash: [6, 3] });
    else if (target) lines.push({ label: "target", curve: [[0, learned[0].at(-1) ?? 1], [target, target]], color: "--ink", dash: [2, 3] });
    if (perSecond && learned[0].length > 1) {
      const [first, last] = [learned[0][0], learned[0].at(-1)];
      lines.push({ label: "by theory", curve: [[first, last], [learned[1][0], learned[1][0] + perSecond * (last - first)]], color: "--dim", dash: [2, 3] });
    }
    this.show(lines, fromZero);
  }
}

// One line per run. Five colours and four dashes: twenty runs look different.
export const RUN_COLORS = ["--blue", "--vermillion", "--green", "--orange", "--ink"];
export const RUN_DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];

export class RunsChart extends Chart {
  constructor(place, isTime) {
    super(place);
    this.isTime = isTime;
  }

  render(curves, labels, x, target) {
    const lines = Object.entries(curves).map(([name, run], at) => ({
      label: labels[name], curve: points(run[x]), color: RUN_COLORS[at % RUN_COLORS.length], dash: RUN_DASHES[at % RUN_DASHES.length],
    }));
    const last = Math.max(0, ...lines.map((line) => line.curve[0].at(-1) ?? 0));
    if (target !== undefined && last) lines.push({ label: `loss ${target}`, curve: [[0, last], [target, target]], color: "--dim", dash: [2, 3] });
    this.show(lines, fromZero);
  }
}

// Curves of a state by their names, each with its label.
export class CurvesChart extends Chart {
  constructor(place, labels) {
    super(place);
    this.labelled = Object.entries(labels);
  }

  render(curves) {
    const lines = this.labelled.map(([name, label], at) => ({ label, curve: points(curves[name]), color: RUN_COLORS[at], dash: RUN_DASHES[at] }));
    this.show(lines, fromZero);
  }
}
