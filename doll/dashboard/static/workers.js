// The table of workers. Only visible rows are in the document, so that 1,000 workers do not slow down the page.

import { byId, clock, element, opener, setText, timeOfDay } from "./dom.js";

const ROW_PX = 24;
const plain = (value) => (value === undefined ? "" : String(value));
const COLUMNS = [
  ["worker", "worker", (row) => row.worker],
  ["state", "state", (row, now) => (row.since_s ? `${row.state} ${clock(now - row.since_s)}` : row.state)],
  ["market", "market", (row) => plain(row.market)],
  ["parts", "partitions", (row) => plain(row.partitions)],
  ["computing", "computing", (row) => (row.computing === undefined ? "" : `${row.computing} %`)],
  ["waiting", "waiting_s", (row) => (row.waiting_s === undefined ? "" : `${row.waiting_s} s`)],
  ["lag", "lag", (row) => (row.lag === undefined ? "" : row.lag.toLocaleString("en"))],
  ["note", "note", (row) => plain(row.note)],
  ["last event", "event_s", (row) => (row.event ? `${row.event} ${timeOfDay(row.event_s)}` : "")],
  ["samples/s", "rate", (row) => plain(row.rate)],
  ["restarts", "restarts", (row) => plain(row.restarts)],
];
const HINTS = {
  computing: "share of the time in which it computes", waiting: "from a batch's completion to its turn",
  lag: "records that it has not read", parts: "partitions that it serves",
};

export class Workers {
  constructor() {
    this.place = byId("workers-place");
    this.body = byId("workers").tBodies[0];
    this.sort = { key: "worker", sign: 1 };
    this.rows = [];
    this.lines = [];
    [this.above, this.below] = [this.spacer(), this.spacer()];
    this.body.append(this.above, this.below);
    this.makeHead();
    this.place.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.place);
    this.body.addEventListener("keydown", (event) => this.move(event));
  }

  spacer() {
    const row = element("tr", "", "spacer");
    row.setAttribute("aria-hidden", "true");
    return row;
  }

  makeHead() {
    const head = element("tr");
    this.heads = COLUMNS.map(([title, key]) => {
      const cell = element("th", "", key);
      cell.scope = "col";
      const button = element("button", title);
      button.type = "button";
      if (HINTS[title]) button.title = HINTS[title];
      button.addEventListener("click", () => {
        this.sort = { key, sign: this.sort.key === key ? -this.sort.sign : key === "worker" || key === "state" ? 1 : -1 };
        this.order();
        this.draw();
      });
      cell.append(button);
      head.append(cell);
      return [cell, key];
    });
    byId("workers").tHead.append(head);
  }

  render(workers, now) {
    this.now = now;
    this.rows = Object.entries(workers).map(([worker, row]) => ({ worker: Number(worker), ...row }));
    byId("workers").setAttribute("aria-rowcount", String(this.rows.length + 1));
    this.order();
    this.draw();
  }

  order() {
    const { key, sign } = this.sort;
    const value = (row) => row[key] ?? "";
    this.rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (typeof x !== typeof y) return typeof x === "string" ? 1 : -1; // unknown ones last
      return (x < y ? -sign : x > y ? sign : 0) || a.worker - b.worker;
    });
    for (const [cell, of] of this.heads) cell.ariaSort = of === key ? (sign > 0 ? "ascending" : "descending") : "none";
  }

  draw() {
    const count = Math.min(this.rows.length, Math.ceil(this.place.clientHeight / ROW_PX) + 2);
    const first = Math.max(0, Math.min(Math.floor(this.place.scrollTop / ROW_PX), this.rows.length - count));
    while (this.lines.length < count) {
      const line = element("tr");
      for (const [, key] of COLUMNS) line.append(element("td", "", key));
      line.cells[0].append(opener("", ""));
      this.below.before(line);
      this.lines.push(line);
    }
    while (this.lines.length > count) this.lines.pop().remove();
    this.lines.forEach((line, at) => this.fill(line, this.rows[first + at], first + at));
    this.above.style.height = `${first * ROW_PX}px`;
    this.below.style.height = `${(this.rows.length - first - count) * ROW_PX}px`;
  }

  fill(line, row, index) {
    const target = `worker/${row.worker}`;
    line.dataset.open = target;
    line.className = row.state;
    line.setAttribute("aria-rowindex", String(index + 2));
    COLUMNS.forEach(([, key, text], at) => {
      const shown = String(text(row, this.now));
      if (at > 0) setText(line.cells[at], shown);
      else {
        const button = line.cells[0].firstChild;
        button.dataset.open = target;
        setText(button, shown);
        button.setAttribute("aria-label", `worker ${shown}`);
      }
      if (key === "note") line.cells[at].title = shown;
    });
  }

  move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const at = this.lines.findIndex((line) => line.contains(document.activeElement));
    if (!step || at < 0) return;
    event.preventDefault();
    this.place.scrollTop += ROW_PX * step * (this.lines[at + step] && at + step < this.lines.length - 3 ? 0 : 1);
    this.lines[at + step]?.cells[0].firstChild.focus({ preventScroll: true });
  }
}
