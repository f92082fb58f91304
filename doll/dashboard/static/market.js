// The market: prices and costs over time, and the market of each worker.

import { CurvesChart } from "./charts.js";
import { byId, fillFacts, ifChanged } from "./dom.js";
import { Timeline } from "./timeline.js";

export class Market {
  constructor() {
    this.section = byId("market");
    this.cost = new CurvesChart(byId("cost-chart"), { spent_usd: "spent", all_on_demand_usd: "all on-demand" });
    this.price = new CurvesChart(byId("price-chart"), { spot_usd_per_h: "spot, USD/h", on_demand_usd_per_h: "on-demand" });
    this.timeline = new Timeline(byId("timeline"));
  }

  render(market) {
    this.section.hidden = !market.spans;
    if (this.section.hidden) return;
    fillFacts(this.section.querySelector(".facts"), market.facts);
    ifChanged(this.section, [market.curves, market.spans, market.now_s], () => {
      this.cost.render(market.curves);
      this.price.render(market.curves);
      this.timeline.render(Object.entries(market.spans), market.now_s);
    });
  }
}
