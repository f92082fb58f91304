// The market: prices and costs, and who ran on which of them when. Markets differ in the height of their bars, not only in colour.

import { CostChart, PriceChart } from "./charts.js";
import { byId, clock, element, fillFacts, ifChanged } from "./dom.js";

const AXIS_PX = 18;
const LABEL_PX = 30;

class Timeline {
  constructor(place) {
    this.place = place;
    this.canvas = element("canvas");
    place.append(this.canvas);
    new ResizeObserver(() => this.draw()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  render(spans, now) {
    [this.spans, this.now] = [spans, now];
    this.draw();
  }

  draw() {
    if (!this.spans) return;
    const rows = Object.values(this.spans);
    const ratio = devicePixelRatio || 1;
    const width = Math.max(80, this.place.clientWidth);
    const row = Math.min(22, Math.max(3, (this.place.clientHeight - AXIS_PX) / Math.max(1, rows.length))); // of 1,000 it scrolls
    const height = row * rows.length + AXIS_PX;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const css = getComputedStyle(document.documentElement);
    const color = (name) => css.getPropertyValue(name).trim();
    const end = Math.max(1, this.now);
    const x = (seconds) => LABEL_PX + ((width - LABEL_PX - 4) * Math.min(seconds, end)) / end;
    pen.font = "11px system-ui, sans-serif";
    rows.forEach((spans, slot) => {
      const top = row * slot;
      pen.fillStyle = color("--line");
      pen.fillRect(LABEL_PX, top + row / 2, width - LABEL_PX - 4, 1);
      for (const [from, to, market] of spans) {
        const share = market === "spot" ? 0.4 : 0.8;
        pen.fillStyle = color(market === "spot" ? "--blue" : "--vermillion");
        pen.fillRect(x(from), top + (row * (1 - share)) / 2, Math.max(1, x(to < 0 ? end : to) - x(from)), row * share);
      }
      if (row >= 12 || slot % Math.ceil(12 / row) === 0) {
        pen.fillStyle = color("--dim");
        pen.textBaseline = "middle";
        pen.fillText(String(slot), 0, top + row / 2);
      }
    });
    pen.fillStyle = color("--dim");
    pen.textBaseline = "bottom";
    pen.textAlign = "left";
    pen.fillText("0 s", LABEL_PX, height);
    pen.textAlign = "right";
    pen.fillText(clock(end), width - 4, height);
  }
}

export class Market {
  constructor() {
    this.section = byId("market");
    this.cost = new CostChart(byId("cost-chart"));
    this.price = new PriceChart(byId("price-chart"));
    this.timeline = new Timeline(byId("timeline"));
  }

  render(market) {
    this.section.hidden = !market.spans;
    if (this.section.hidden) return;
    fillFacts(this.section.querySelector(".facts"), market.facts);
    ifChanged(this.section, [market.curves, market.spans, market.now_s], () => {
      this.cost.render(market.curves);
      this.price.render(market.curves);
      this.timeline.render(market.spans, market.now_s);
    });
  }
}
