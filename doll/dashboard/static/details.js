// The dialog that a click opens: details of a worker, an update, a dead letter, a decision or a version.

import { byId, fillFacts, fillTable } from "./dom.js";
import { saved } from "./state.js";

const dialog = byId("detail");
const WAIT_MS = 10_000;

async function ask(target) {
  if (saved) return saved.details[target] ?? { error: "this file does not have it: doll dashboard shows all of a run" };
  try {
    const answer = await fetch(`api/${target}`, { headers: { Accept: "application/json" }, signal: AbortSignal.timeout(WAIT_MS) });
    return await answer.json();
  } catch (error) {
    return { error: `the server does not answer (${error.message})` };
  }
}

async function open(target) {
  const detail = await ask(target);
  byId("detail-title").textContent = detail.title ?? detail.error;
  fillFacts(dialog.querySelector("dl"), detail.facts ?? []);
  const place = dialog.querySelector(".detail-table");
  place.hidden = !detail.rows?.length;
  if (!place.hidden) fillTable(place.querySelector("table"), detail.columns, detail.rows);
  if (!dialog.open) dialog.showModal();
}

export function listen() {
  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-open]")?.dataset.open;
    if (target) open(target);
    else if (event.target === dialog) dialog.close(); // beside it
  });
  byId("detail-close").addEventListener("click", () => dialog.close());
}
