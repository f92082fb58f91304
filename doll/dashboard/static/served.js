// The model server: which versions answer, and how long answers take.

import { LatencyChart, RequestsChart } from "./charts.js";
import { byId, fillFacts, ifChanged, setText } from "./dom.js";

export class ModelServer {
  constructor() {
    this.section = byId("served");
    this.latency = new LatencyChart(byId("latency-chart"));
    this.requests = new RequestsChart(byId("requests-chart"));
  }

  render(served) {
    this.section.hidden = !served.curves;
    if (this.section.hidden) return;
    setText(this.section.querySelector(".problem"), served.problem);
    fillFacts(this.section.querySelector(".facts"), served.facts);
    ifChanged(this.section, served.curves, () => {
      this.latency.render(served.curves);
      this.requests.render(served.curves);
    });
  }
}
