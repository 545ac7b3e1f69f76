// The operator's part of the page: a login, then views of models, keys and records.

import { html, useEffect, useState } from "./vendor/preact.js";
import { dayAndTime } from "./format.js";
import { LoginForm, logOut, look, useSession } from "./login.js";
import { Empty } from "./parts.js";
import { Refused } from "./session.js";
import { Keys } from "./admin/keys.js";
import { Models } from "./admin/models.js";
import { Alerts, Calendar, Callbacks, Events, Usage } from "./admin/record.js";

const VIEWS = [
  ["models", "Models and jobs", Models],
  ["keys", "Keys and tiers", Keys],
  ["usage", "Usage", Usage],
  ["events", "Events", Events],
  ["alerts", "Alerts", Alerts],
  ["callbacks", "Webhooks and mail", Callbacks],
  ["calendar", "Calendar", Calendar],
];

/** The operator's part: `place` names a view, and `parts` contains the state of the server. */
export function Admin({ parts, place }) {
  const session = useSession();
  const [problem, setProblem] = useState("");
  useEffect(() => void look(), []);
  if (!session.is_known) return html`<${Empty}>Loading…</${Empty}>`;
  if (!session.operator) return html`<${LoginForm} />`;

  async function leave() {
    try {
      await logOut();
    } catch (refused) {
      if (!(refused instanceof Refused)) throw refused;
      setProblem(refused.message);
    }
  }
  const [chosen, , View] = VIEWS.find(([name]) => name === place) ?? VIEWS[0];
  const generations = (parts.server?.generations ?? []).map((each) => each.generation);
  return html`<div class="admin">
    <div class="admin-head">
      <nav aria-label="Operator's views"><ul>
        ${VIEWS.map(([name, title]) => html`<li key=${name}>
          <a href=${`#/operate/${name}`} aria-current=${name === chosen ? "page" : undefined}>${title}</a>
        </li>`)}
      </ul></nav>
      <p class="note buttons"><span>Logged in until ${dayAndTime(session.until)}</span>
        <button type="button" onClick=${leave}>Log out</button></p>
    </div>
    <p role="alert" class="problem">${problem}</p>
    <${View} key=${chosen} changed=${parts.models} generations=${generations} />
  </div>`;
}
