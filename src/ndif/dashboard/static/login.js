// The operator's login: this browser's session, and the login form.
// Scripts cannot read the session's cookie; the page knows only the CSRF token, and sends it with every change.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { connect } from "./live.js";
import { Card } from "./parts.js";
import { Refused } from "./session.js";

const NOBODY = { is_known: false, operator: false, until: null, csrf: null, has_password: false };
const CLOCK_MS = 30_000;

let session = NOBODY;
const listeners = new Set();

function become(next) {
  session = next;
  for (const listener of listeners) listener(next);
}

async function exchange(method, path, body) {
  const headers = { Accept: "application/json" };
  const options = { method, headers, credentials: "same-origin", cache: "no-store" };
  if (method !== "GET") {
    headers["Content-Type"] = "application/json";
    if (session.csrf) headers["X-CSRF-Token"] = session.csrf;
    options.body = JSON.stringify(body ?? {});
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Refused(0, "The server does not answer. Try again once it does.");
  }
  const content = await answer.json().catch(() => null);
  if (answer.ok && content !== null) return content;
  throw new Refused(answer.status, content?.detail ?? `The server answered ${answer.status}.`);
}

/** Return the answer of an operator's route, or raise its refusal; on a 401, read the session again. */
export async function ask(method, path, body) {
  try {
    return await exchange(method, path, body);
  } catch (refused) {
    if (refused.status === 401) await look();
    throw refused;
  }
}

/** Read this browser's session from the server. */
export async function look() {
  try {
    become({ ...(await exchange("GET", "/session")), is_known: true });
  } catch {
    // The server is unavailable: the known session may still be valid.
  }
}

export async function logIn(password) {
  become({ ...(await exchange("POST", "/login", { password })), is_known: true });
  connect({ anew: true }); // an operator sees what users see
}

export async function logOut() {
  try {
    await exchange("POST", "/logout");
  } finally {
    await look();
    connect({ anew: true });
  }
}

/** Return the session, and render again when it changes. */
export function useSession() {
  const [found, become] = useState(session);
  useEffect(() => {
    listeners.add(become);
    become(session);
    const clock = setInterval(() => {
      if (session.operator && Date.now() / 1000 >= session.until) look();
    }, CLOCK_MS);
    return () => {
      listeners.delete(become);
      clearInterval(clock);
    };
  }, []);
  return found;
}

/** The login form. */
export function LoginForm() {
  const { has_password: hasPassword } = useSession();
  const field = useRef(null);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);

  async function submit(event) {
    event.preventDefault();
    if (busy) return;
    setBusy(true);
    setProblem("");
    try {
      await logIn(field.current.value);
    } catch (refused) {
      setProblem(refused.message);
      field.current.select();
    } finally {
      setBusy(false);
    }
  }

  return html`<${Card} title="Operator's login" id="operator-login"><form class="key" onSubmit=${submit}>
    <p>
      <label for="login-password">${hasPassword ? "Password, or the server's token" : "The server's token"}</label>
      <input id="login-password" ref=${field} type="password" autocomplete="current-password" required
        maxlength="1024" aria-describedby="login-help" aria-invalid=${problem ? "true" : "false"} />
    </p>
    <p id="login-help" class="note">
      ${hasPassword
        ? "The server's operator has set the password."
        : "The token is in the file “token” of the server's session folder. The command “ndif admin password” sets a password."}
    </p>
    <p><button class="primary" disabled=${busy}>${busy ? "Looking…" : "Log in"}</button></p>
    <p role="alert" class="problem">${problem}</p>
  </form></${Card}>`;
}
