// The page: it draws the state from the server (doll/monitor/views/page.py), and computes nothing.

import { ErrorChart, SamplesChart } from "./charts.js";
import { listen } from "./details.js";
import { byId, clock, element, fillFacts, fillTable, ifChanged, setText, timeOfDay } from "./dom.js";
import { Market } from "./market.js";
import { Panels } from "./panels.js";
import { ModelServer } from "./served.js";
import { follow, oldText, saved } from "./state.js";
import { Workers } from "./workers.js";

const LISTS = {
  updates: ["update", "samples", "loss", "batches"],
  versions: ["version", "held-out loss", "accuracy", "state"],
  letters: ["partition-offset", "reason"],
  decisions: ["turn", "at", "what"],
};
const LONG = 90; // characters of an event, which take two or three lines
const ICONS = { good: "✔", warn: "▲", bad: "✖", none: "…" };
const workers = new Workers();
const market = new Market();
const served = new ModelServer();
const panels = new Panels(byId("panels"));
const errors = new ErrorChart(byId("error-chart"));
const samples = new SamplesChart(byId("samples-chart"));
let chosen = ""; // measure; "": accuracy where there is one
let latest = null;

function renderJob(job, age) {
  const state = age ? oldText(age) : job.state;
  document.title = `${job.name}: ${state} - DOLL`;
  setText(byId("name"), job.name);
  setText(byId("state"), state);
  byId("state").className = `state ${age || !job.is_seen ? "lost" : job.is_live ? "live" : "ended"}`;
  for (const name of ["doing", "shape", "time"]) setText(byId(name), job[name]);
}

function renderQuestion(id, question, age) {
  const section = byId(id);
  const verdict = section.querySelector(".verdict");
  const tone = age ? "none" : question.tone;
  const text = age ? `${clock(age)} ago: ${question.verdict}` : question.verdict;
  ifChanged(verdict, [tone, text], () => {
    const icon = element("span", ICONS[tone], "icon");
    icon.setAttribute("aria-hidden", "true");
    verdict.className = `verdict ${tone}`;
    verdict.title = text;
    verdict.replaceChildren(icon, text);
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

// A long text that is shortened; a click or a key shows the rest.
function folded(text) {
  const all = element("details");
  all.append(element("summary", text));
  return all;
}

function renderLists(lists) {
  ifChanged(byId("events"), lists.events, () => {
    byId("events").replaceChildren(
      ...lists.events.map(([at, text]) => {
        const line = element("li");
        line.append(element("time", timeOfDay(at)), text.length > LONG ? folded(text) : element("span", text));
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
  (state, changed, age) => {
    latest = state;
    const news = (part) => changed.has(part);
    document.body.classList.toggle("old", age > 0);
    document.body.classList.toggle("unseen", !state.job.is_seen);
    renderJob(state.job, age);
    if (news("questions") || news("age")) {
      for (const [id, question] of Object.entries(state.questions)) renderQuestion(id, question, age);
    }
    if (news("curves")) {
      renderErrors();
      samples.render(state.curves);
    }
    if (news("workers") || news("job")) workers.render(state.workers, state.job.now_s);
    if (news("market")) market.render(state.market);
    if (news("served")) served.render(state.served);
    if (news("panels")) panels.render(state.panels);
    if (news("lists")) renderLists(state.lists);
    document.body.dataset.ready = "true";
  },
  (state) => !state.job.is_live,
);
for (const name of ["accuracy", "loss"]) {
  byId(`show-${name}`).addEventListener("click", () => {
    chosen = name;
    if (latest) renderErrors();
  });
}
byId("all-runs").hidden = Boolean(saved) || !location.pathname.startsWith("/runs/");
listen();
