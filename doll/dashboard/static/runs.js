// Runs side by side: it draws the state from the server (doll/monitor/views/comparison.py).

import { RunsChart } from "./charts.js";
import { byId, element, ifChanged, setText } from "./dom.js";
import { Panels } from "./panels.js";
import { follow, oldText, saved } from "./state.js";

const ICONS = { good: "✔", bad: "✖", none: "…" };
const charts = { seconds: new RunsChart(byId("seconds-chart"), true), samples: new RunsChart(byId("samples-chart"), false) };
const panels = new Panels(byId("panels"));

function renderTable(columns, runs) {
  const rows = Object.entries(runs);
  ifChanged(byId("runs"), [columns, rows], () => {
    const focused = document.activeElement?.getAttribute?.("href");
    const [head, body] = [element("thead"), element("tbody")];
    const titles = element("tr");
    for (const column of columns) {
      const cell = element("th", column);
      cell.scope = "col";
      titles.append(cell);
    }
    head.append(titles);
    for (const [name, { label, cells, tone }] of rows) {
      const line = element("tr", "", tone);
      const first = element("td");
      const icon = element("span", ICONS[tone], "icon");
      icon.setAttribute("aria-hidden", "true");
      const link = element(tone === "none" ? "span" : "a", label);
      if (tone !== "none") link.href = saved ? `${encodeURIComponent(name)}/report.html` : `runs/${encodeURIComponent(name)}/`;
      first.append(icon, link);
      line.append(first, ...cells.slice(1).map((cell) => element("td", cell)));
      body.append(line);
    }
    byId("runs").replaceChildren(head, body);
    if (focused) byId("runs").querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  });
}

const isUnderWay = (state) => state.missing.length > 0 || Object.values(state.runs).some((run) => run.tone === "none");

follow(
  (state, changed, age) => {
    const labels = Object.fromEntries(Object.entries(state.runs).map(([name, run]) => [name, run.label]));
    const runs = state.missing.length ? `to come: ${state.missing.join(", ")}` : `${Object.keys(state.runs).length} runs`;
    document.title = `${state.job}: runs - DOLL`;
    document.body.classList.toggle("old", age > 0);
    setText(byId("name"), state.job);
    setText(byId("headline"), state.headline);
    setText(byId("state"), age ? oldText(age) : runs);
    byId("state").className = `state ${age ? "lost" : state.missing.length ? "live" : "ended"}`;
    setText(byId("conclusion"), state.conclusion ?? "");
    setText(byId("notes"), state.notes.join("; "));
    renderTable(state.columns, state.runs);
    for (const [x, chart] of Object.entries(charts)) chart.render(state.curves, labels, x, state.target);
    for (const [x, title] of [["seconds", "time"], ["samples", "samples"]]) setText(byId(`${x}-title`), `Loss (${state.kind}) over ${title}`);
    panels.render(state.panels);
    document.body.dataset.ready = "true";
  },
  (state) => !isUnderWay(state),
);
