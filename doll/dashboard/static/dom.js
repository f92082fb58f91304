// Small helpers for the document. Text is set as text, never as HTML: names and reasons come from other users.

export const byId = (id) => document.getElementById(id);

export function element(name, text = "", className = "") {
  const node = document.createElement(name);
  if (text) node.textContent = text;
  if (className) node.className = className;
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Calls `draw` if `value` differs from the value that this node showed last.
export function ifChanged(node, value, draw) {
  const key = JSON.stringify(value);
  if (node.shown === key) return;
  node.shown = key;
  draw();
}

export function fillFacts(list, facts) {
  ifChanged(list, facts, () => {
    list.replaceChildren(
      ...facts.map(([name, text]) => {
        const [pair, value] = [element("div"), element("dd", text)];
        value.title = text;
        pair.append(element("dt", name), value);
        return pair;
      }),
    );
  });
}

// A table of text cells. `open(row)` returns the name of the item that a click on the row opens; "" if none.
export function fillTable(table, columns, rows, open = () => "") {
  ifChanged(table, rows, () => {
    const focused = document.activeElement?.dataset?.open;
    const head = element("tr");
    for (const column of columns) {
      const cell = element("th", column);
      cell.scope = "col";
      head.append(cell);
    }
    const body = element("tbody");
    for (const row of rows) body.append(tableRow(row, open(row)));
    if (!rows.length) {
      const cell = element("td", "none", "dim");
      cell.colSpan = columns.length;
      body.append(element("tr"));
      body.firstChild.append(cell);
    }
    const top = element("thead");
    top.append(head);
    table.replaceChildren(top, body);
    if (focused && table.contains(document.activeElement) === false) {
      table.querySelector(`button[data-open="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    }
  });
}

function tableRow(row, target) {
  const line = element("tr");
  row.forEach((text, at) => {
    const cell = element("td");
    if (at === 0 && target) cell.append(opener(String(text), target));
    else cell.textContent = text;
    line.append(cell);
  });
  if (target) line.dataset.open = target;
  return line;
}

export function opener(text, target) {
  const button = element("button", text, "open");
  button.type = "button";
  button.dataset.open = target;
  return button;
}

// `12 s`, `3:05` or `2:03:05`, as the terminal shows it.
export function clock(seconds) {
  if (!Number.isFinite(seconds)) return "";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const two = (value) => String(value).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function timeOfDay(unix) {
  return unix ? new Date(1000 * unix).toLocaleTimeString([], { hour12: false }) : "";
}
