// The page: its head, its views, and its messages while no state is available.

import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";
import { connect, listen, live } from "./live.js";
import { Card, KeyForm } from "./parts.js";
import { key, useKey } from "./session.js";
import { views, viewAt } from "./views.js";

const THEMES = { auto: "dark", dark: "light", light: "auto" };
const STATUS = { live: "Live", connecting: "Connecting", away: "Unavailable", refused: "Not logged in" };

function Theme() {
  const root = document.documentElement;
  const [theme, setTheme] = useState(root.dataset.theme ?? "auto");
  const change = () => {
    const next = THEMES[theme];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("ndif-theme", next);
    } catch {
      // Without storage, the choice lasts until the page is closed.
    }
    setTheme(next);
    dispatchEvent(new Event("ndif-theme"));
  };
  return html`<button type="button" class="theme" onClick=${change} aria-label=${`Colours: ${theme}`}>
    <span class=${`sun ${theme}`} aria-hidden="true"></span><span>${theme}</span>
  </button>`;
}

function Head({ view, parts }) {
  const leave = () => {
    useKey("");
    connect({ anew: true });
  };
  return html`<header class="head">
    <div class="inner">
      <a class="brand" href="#/"><span class="mark" aria-hidden="true"><i></i><i></i><i></i></span>ndif
        <span class="host">${location.host}</span></a>
      <nav aria-label="Views">${views.filter((each) => !each.isLinked).map((each) => html`<a key=${each.path} href=${`#/${each.path}`}
        aria-current=${each === view ? "page" : undefined}>${each.title}</a>`)}</nav>
      <div class="tools">
        <span class=${`link is-${live.status}`} role="status">${STATUS[live.status]}</span>
        ${key() && html`<button type="button" onClick=${leave}>Forget key</button>`}
        <${Theme} />
      </div>
    </div>
  </header>`;
}

function Login({ sentence, isPublic }) {
  return html`<${Card} title="Log in" id="login">
    <p>${isPublic
      ? "The server refuses this page now."
      : "This server shows its models, queues and nodes only to its users. Log in with your API key from the server's operator."}</p>
    <${KeyForm} onKey=${() => connect({ anew: true })} sentence=${sentence} />
  </${Card}>`;
}

function App() {
  const [, changed] = useState(0);
  const [hash, setHash] = useState(location.hash);
  const main = useRef(null);
  // Listen before the page is painted: a state that arrives earlier might never be shown.
  useLayoutEffect(() => listen(() => changed((before) => before + 1)), []);
  useLayoutEffect(() => {
    const moved = () => {
      setHash(location.hash);
      main.current?.focus({ preventScroll: true });
      scrollTo(0, 0);
    };
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const { view, place } = viewAt(hash);
  useEffect(() => {
    document.title = `${view.title} · ndif`;
  }, [view]);
  const isShut = live.status === "refused" && view.needs !== "nothing";
  return html`<a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      main.current.focus();
    }}>Skip to the content</a>
    <${Head} view=${view} parts=${live.parts} />
    <main id="main" tabindex="-1" ref=${main}>
      <h1 class="off-screen">${view.title}</h1>
      ${!isSecureContext && html`<p class="banner">This page was loaded over plain HTTP: others on the network can read the keys and passwords that you enter. Use an https address.</p>`}
      ${live.status === "away" && html`<p class="banner" role="alert">${live.sentence} The page may show old data; it reconnects automatically.</p>`}
      ${live.keyProblem && !isShut && view.path !== "jobs" && html`<p class="banner" role="alert">${live.keyProblem}</p>`}
      ${isShut
        ? html`<${Login} sentence=${live.keyProblem || (key() && live.sentence)} isPublic=${live.parts.server.access === "public"} />`
        : html`<${view.component} parts=${live.parts} place=${place} sentence=${live.keyProblem} />`}
    </main>
    <footer class="foot"><p>ndif ${live.parts.server?.version ?? ""} · <a href="/docs">routes</a></p></footer>`;
}

render(html`<${App} />`, document.getElementById("app"));
connect();
