// The page: it draws what the server has made of the job's records (doll/monitor/views/page.py), and computes nothing.

import { ErrorChart, SamplesChart } from "./charts.js";
import { listen } from "./details.js";
import { byId, element, fillFacts, fillTable, ifChanged, setText, timeOfDay } from "./dom.js";
import { Market } from "./market.js";
import { ModelServer } from "./served.js";
import { follow } from "./state.js";
import { Workers } from "./workers.js";

const LISTS = {
  updates: ["update", "samples", "loss", "batches"],
  versions: ["version", "held-out loss", "accuracy", "state"],
  letters: ["partition-offset", "reason"],
  decisions: ["turn", "at", "what"],
};
const ICONS = { good: "✔", warn: "▲", bad: "✖", none: "…" };
const workers = new Workers();
const market = new Market();
const served = new ModelServer();
const errors = new ErrorChart(byId("error-chart"));
const samples = new SamplesChart(byId("samples-chart"));
let chosen = ""; // measure; "": accuracy where there is one
let latest = null;

function renderJob(job) {
  document.title = `${job.name}: ${job.state} - DOLL`;
  setText(byId("name"), job.name);
  setText(byId("state"), job.state);
  byId("state").className = `state ${job.is_live ? "live" : "ended"}`;
  for (const name of ["doing", "shape", "time"]) setText(byId(name), job[name]);
}

function renderQuestion(id, question) {
  const section = byId(id);
  const verdict = section.querySelector(".verdict");
  ifChanged(verdict, [question.tone, question.verdict], () => {
    const icon = element("span", ICONS[question.tone], "icon");
    icon.setAttribute("aria-hidden", "true");
    verdict.className = `verdict ${question.tone}`;
    verdict.title = question.verdict;
    verdict.replaceChildren(icon, question.verdict);
  });
  fillFacts(section.querySelector(".facts"), question.facts);
  if (question.bars) renderBars(section.querySelector(".bars"), question.bars);
}

function renderBars(place, bars) {
  ifChanged(place, bars, () => {
    place.replaceChildren(
      ...bars.flatMap(({ label, share, text }) => {
        const bar = element("progress");
        bar.max = 1;
        bar.value = Math.min(1, share);
        bar.setAttribute("aria-label", `${label}: ${text}`);
        return [element("span", label), bar, element("span", text, "text")];
      }),
    );
  });
}

function renderErrors() {
  const { curves } = latest;
  const has = (measure) => Object.keys(curves[measure].held_out).length + Object.keys(curves[measure].prequential).length > 0;
  const byTarget = curves.marks.loss !== undefined && curves.marks.accuracy === undefined ? "loss" : "accuracy";
  const measure = has("accuracy") ? chosen || byTarget : "loss";
  for (const name of ["accuracy", "loss"]) byId(`show-${name}`).setAttribute("aria-pressed", String(name === measure));
  document.querySelector(".choice").hidden = !has("accuracy");
  errors.render(curves, measure);
}

function renderLists(lists) {
  ifChanged(byId("events"), lists.events, () => {
    byId("events").replaceChildren(
      ...lists.events.map(([at, text]) => {
        const line = element("li");
        line.append(element("time", timeOfDay(at)), element("span", text));
        return line;
      }),
    );
  });
  for (const [name, columns] of Object.entries(LISTS)) {
    const rows = Object.entries(lists[name]).reverse(); // the newest first
    fillTable(byId(name), columns, rows.map(([key, cells]) => [key].concat(cells)), (row) => `${name.slice(0, -1)}/${row[0]}`);
  }
}

follow(
  (state, changed) => {
    latest = state;
    renderJob(state.job);
    if (changed.has("questions")) for (const [id, question] of Object.entries(state.questions)) renderQuestion(id, question);
    if (changed.has("curves")) {
      renderErrors();
      samples.render(state.curves);
    }
    if (changed.has("workers") || changed.has("job")) workers.render(state.workers, state.job.now_s);
    if (changed.has("market")) market.render(state.market);
    if (changed.has("served")) served.render(state.served);
    if (changed.has("lists")) renderLists(state.lists);
    document.body.dataset.ready = "true";
  },
  () => {
    byId("state").className = "state lost";
    setText(byId("state"), "not connected: trying again");
  },
);
for (const name of ["accuracy", "loss"]) {
  byId(`show-${name}`).addEventListener("click", () => {
    chosen = name;
    if (latest) renderErrors();
  });
}
byId("all-runs").hidden = !location.pathname.startsWith("/runs/");
listen();
