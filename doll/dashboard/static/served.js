// The model server: the versions that answer, and the response times.

import { CurvesChart } from "./charts.js";
import { byId, fillFacts, ifChanged, setText } from "./dom.js";

export class ModelServer {
  constructor() {
    this.section = byId("served");
    this.latency = new CurvesChart(byId("latency-chart"), { median_ms: "median, ms", p99_ms: "99 % below" });
    this.requests = new CurvesChart(byId("requests-chart"), { per_s: "requests per second" });
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
