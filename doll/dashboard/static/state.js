// The state of the job, as the server sends it: whole at first, then as merge patches (RFC 7386).

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function mergePatch(target, patch) {
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete target[name];
    else if (isObject(value)) target[name] = mergePatch(isObject(target[name]) ? target[name] : {}, value);
    else target[name] = value;
  }
  return target;
}

// Calls `render(state, changed)` at most once per frame; `changed` names the parts that differ since the last call.
export function follow(render, disconnected) {
  let state = null;
  let changed = new Set();
  const take = (next, parts) => {
    state = next;
    if (!changed.size) requestAnimationFrame(draw);
    for (const part of parts) changed.add(part);
  };
  const draw = () => {
    const parts = changed;
    changed = new Set();
    render(state, parts);
  };
  const source = new EventSource("events");
  source.addEventListener("state", (event) => {
    const whole = JSON.parse(event.data);
    take(whole, Object.keys(whole));
  });
  source.addEventListener("patch", (event) => {
    const patch = JSON.parse(event.data);
    if (state) take(mergePatch(state, patch), Object.keys(patch));
  });
  source.addEventListener("error", disconnected);
}
