// Charts of any series: the `panels` of a state (doll/monitor/views/panels.py).

import { Chart, RUN_COLORS, RUN_DASHES, wide } from "./charts.js";
import { element, ifChanged } from "./dom.js";
import { Timeline } from "./timeline.js";

const STYLES = {
  line: {},
  step: { paths: uPlot.paths.stepped({ align: 1 }), points: false },
  bars: { paths: uPlot.paths.bars({ size: [0.7, 60] }), points: false, isFilled: true },
  mark: { color: "--ink", points: true, dash: [] },
  formula: { color: "--ink", dash: [6, 3], points: false },
};

class PanelChart extends Chart {
  constructor(place) {
    super(place);
    this.isTime = false;
  }

  render(panel) {
    this.labels = [panel.x_label, panel.y_label];
    const aside = panel.lines.some((line) => line.style === "bars") ? 0.5 : 0;
    const lines = panel.lines.map(({ label, x, y, style }, at) => ({
      label, curve: [x, y], color: RUN_COLORS[at % RUN_COLORS.length], dash: RUN_DASHES[at % RUN_DASHES.length],
      points: x.length < 40, ...STYLES[style],
    }));
    this.show(lines, { x: (min, max) => wide((min ?? 0) - aside, (max ?? 1) + aside), y: (min, max) => [Math.min(0, min ?? 0), 1.05 * (max || 1)] });
  }
}

export class Panels {
  constructor(place) {
    this.place = place;
  }

  render(panels = []) {
    ifChanged(this.place, panels.map((panel) => panel.title), () => {
      this.place.replaceChildren();
      this.charts = panels.map((panel) => this.chart(panel));
    });
    panels.forEach((panel, at) => {
      if (panel.rows) this.charts[at].render(panel.rows, panel.end);
      else this.charts[at].render(panel);
    });
  }

  chart(panel) {
    const [section, around, place] = [element("section", "", "half"), element("div", "", "chart-place"), element("div", "", "chart")];
    section.append(element("h2", panel.title), around);
    around.append(place);
    this.place.append(section);
    if (panel.rows) around.className = "timeline-place";
    if (panel.rows) place.className = "timeline";
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", panel.title);
    return panel.rows ? new Timeline(place) : new PanelChart(place);
  }
}
