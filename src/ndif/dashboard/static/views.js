// The views of the page, in the order of the navigation. A view is shown at #/PATH; `place` is the rest of the path.

import { html, useEffect, useState } from "./vendor/preact.js";
import { Connect } from "./connect.js";
import { Jobs } from "./jobs.js";
import { Model } from "./model.js";
import { Overview } from "./overview.js";

export const views = [
  { path: "", title: "Overview", component: Overview, needs: "state" },
  { path: "jobs", title: "My jobs", component: Jobs, needs: "user" },
  { path: "connect", title: "Connect", component: Connect, needs: "nothing" },
  // The view shows `/models/NAME`, which is as public as `/status`; links lead to the view.
  { path: "model", title: "Model", component: Model, needs: "nothing", isLinked: true },
];
// Some servers have the operator's routes on one port only, and others on no port.
if (document.documentElement.dataset.operators === "here") {
  views.push({ path: "operate", title: "Operate", component: Operate, needs: "nothing" });
}

/** The operator's view, whose files are loaded when it is first opened. */
function Operate(props) {
  const [loaded, setLoaded] = useState(null);
  useEffect(() => void import("./admin.js").then(setLoaded), []);
  return loaded && html`<${loaded.Admin} ...${props} />`;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // the address is truncated
  }
}

export function viewAt(hash) {
  const place = hash.replace(/^#\/?/, "");
  const [path, ...rest] = decoded(place).split("/");
  return { view: views.find((each) => each.path === path) ?? views[0], place: rest.join("/") };
}
