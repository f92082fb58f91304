// What a click opens: a dialog with what the server says of a worker, an update, a dead letter, a decision, a version.

import { byId, fillFacts, fillTable } from "./dom.js";

const dialog = byId("detail");

async function open(target) {
  const [kind, key] = target.split("/");
  let detail;
  try {
    const answer = await fetch(`api/${kind}/${key}`, { headers: { Accept: "application/json" } });
    detail = await answer.json();
  } catch (error) {
    detail = { error: `the server does not answer (${error.message})` };
  }
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
