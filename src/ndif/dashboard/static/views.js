// The views of the page, in the order of the navigation. A view is shown at #/PATH, with the rest of it as `place`.

import { html, useEffect, useState } from "./vendor/preact.js";
import { Connect } from "./connect.js";
import { Jobs } from "./jobs.js";
import { Model } from "./model.js";
import { Overview } from "./overview.js";

export const views = [
  { path: "", title: "Overview", component: Overview, needs: "state" },
  { path: "jobs", title: "My jobs", component: Jobs, needs: "user" },
  { path: "connect", title: "Connect", component: Connect, needs: "nothing" },
  // `/models/NAME`, which it shows, is as public as `/status`; links lead to it.
  { path: "model", title: "Model", component: Model, needs: "nothing", isLinked: true },
];
// The operator's routes are on one port of some servers, and on none of others.
if (document.documentElement.dataset.operators === "here") {
  views.push({ path: "operate", title: "Operate", component: Operate, needs: "nothing" });
}

/** The operator's view, whose files are loaded once somebody opens it. */
function Operate(props) {
  const [loaded, setLoaded] = useState(null);
  useEffect(() => void import("./admin.js").then(setLoaded), []);
  return loaded && html`<${loaded.Admin} ...${props} />`;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // which somebody has cut
  }
}

export function viewAt(hash) {
  const place = hash.replace(/^#\/?/, "");
  const [path, ...rest] = decoded(place).split("/");
  return { view: views.find((each) => each.path === path) ?? views[0], place: rest.join("/") };
}
