// The state of the job and its age. The server sends the whole state first, then merge patches (RFC 7386).

import { byId, clock, setText } from "./dom.js";

// The state inside the file if the page was saved (doll/dashboard/saved_page.py); null if a server sends the state.
export const saved = JSON.parse(byId("saved")?.textContent ?? "null");

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function mergePatch(target, patch) {
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete target[name];
    else if (isObject(value)) target[name] = mergePatch(isObject(target[name]) ? target[name] : {}, value);
    else target[name] = value;
  }
  return target;
}

// The message for a state of this age in seconds.
export const oldText = (seconds) => `not connected: what is shown is ${clock(seconds)} old`;

const LOOK_MS = 1000;
const AGAIN_MS = 5000;

// Calls `render(state, changed, age)` at most once per frame; `changed` names the parts that differ since the last call.
//
// The server sends an event every `state.every_s` seconds. `age` is 0 while events arrive. If the server is unavailable or
// silent, `age` is the age of the state in seconds, and `render` is called each second. A state for which `isFinal(state)`
// is true has no age. A saved state is drawn once.
export function follow(render, isFinal) {
  if (saved) {
    render(saved, new Set(Object.keys(saved)), 0);
    return;
  }
  let state = null;
  let changed = new Set();
  let heardMs = Date.now();
  let isAway = false;
  let wasOld = false;
  let source;
  const age = () => {
    if (!state || isFinal(state)) return 0;
    const silent = (Date.now() - heardMs) / 1000;
    return isAway || silent > 10 + 2 * state.every_s ? Math.max(1, Math.round(silent)) : 0;
  };
  const draw = () => {
    const parts = changed;
    changed = new Set();
    wasOld = age() > 0;
    render(state, parts, age());
  };
  const take = (next, parts) => {
    state = next;
    if (!changed.size) requestAnimationFrame(draw);
    for (const part of parts) changed.add(part);
  };
  const heard = () => {
    heardMs = Date.now();
    isAway = false;
    if (wasOld) take(state, ["age"]);
  };
  const connect = () => {
    source = new EventSource("events");
    source.addEventListener("state", (event) => {
      const whole = JSON.parse(event.data);
      heard();
      take(whole, Object.keys(whole));
    });
    source.addEventListener("patch", (event) => {
      const patch = JSON.parse(event.data);
      heard();
      if (state) take(mergePatch(state, patch), Object.keys(patch));
    });
    source.addEventListener("beat", heard);
    source.addEventListener("error", () => {
      isAway = true;
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, AGAIN_MS); // refused: it does not try again itself
      if (state) take(state, ["age"]);
      else setText(byId("state"), "not connected: trying again");
    });
  };
  connect();
  setInterval(() => {
    if (state && (age() || wasOld)) take(state, ["age"]);
  }, LOOK_MS);
}
