// A page with a title and charts, written by `doll plan --plot` and `doll simulate --out` (doll/monitor/views/panels.py).

import { byId, setText } from "./dom.js";
import { Panels } from "./panels.js";
import { follow } from "./state.js";

const panels = new Panels(byId("panels"));

follow(
  (state) => {
    document.title = `${state.name} - DOLL`;
    setText(byId("name"), state.name);
    setText(byId("headline"), state.headline);
    panels.render(state.panels);
    document.body.dataset.ready = "true";
  },
  () => true,
);
