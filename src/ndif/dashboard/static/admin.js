// The operator's part of the page: a login, and then the views on models, keys and the record.

import { html, useEffect, useState } from "./vendor/preact.js";
import { LoginForm, Refused, logOut, look, useSession } from "./login.js";
import { Keys } from "./admin/keys.js";
import { Models } from "./admin/models.js";
import { Alerts, Calendar, Callbacks, Events, Usage } from "./admin/record.js";

const VIEWS = [
  ["models", "Models and jobs", Models],
  ["keys", "Keys and tiers", Keys],
  ["usage", "Usage", Usage],
  ["events", "Events", Events],
  ["alerts", "Alerts", Alerts],
  ["callbacks", "Call-backs", Callbacks],
  ["calendar", "Calendar", Calendar],
];

/**
 * The operator's part. `changed` changes with the state of the server, so that what is shown is read again;
 * `generations` are the installed nnsight.
 */
export function Admin({ changed, generations = [] }) {
  const session = useSession();
  const [chosen, setChosen] = useState("models");
  const [problem, setProblem] = useState("");
  useEffect(() => void look(), []);
  if (!session.available) return html`<p class="quiet">This address has no operator's routes.</p>`;
  if (!session.operator) return html`<${LoginForm} />`;

  async function leave() {
    try {
      await logOut();
    } catch (refused) {
      if (!(refused instanceof Refused)) throw refused;
      setProblem(refused.message);
    }
  }
  const View = VIEWS.find(([name]) => name === chosen)[2];
  return html`<div class="admin">
    <div class="admin-head">
      <nav aria-label="Operator's views"><ul>
        ${VIEWS.map(([name, title]) => html`<li key=${name}>
          <button type="button" aria-current=${name === chosen ? "page" : undefined} onClick=${() => setChosen(name)}>${title}</button>
        </li>`)}
      </ul></nav>
      <p class="quiet">Logged in until ${new Date(session.until * 1000).toLocaleTimeString()}.
        <button type="button" onClick=${leave}>Log out</button></p>
    </div>
    <p role="alert" class="problem">${problem}</p>
    <${View} key=${chosen} changed=${changed} generations=${generations} />
  </div>`;
}
