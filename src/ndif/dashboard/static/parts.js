// Small components that several views share.

import { html, useEffect, useRef, useState } from "./vendor/preact.js";
import { now } from "./live.js";
import { useKey } from "./session.js";

export function useNow(everyMs) {
  const [moment, tick] = useState(now());
  useEffect(() => {
    const timer = setInterval(() => tick(now()), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return Math.max(moment, now());
}

export function Card({ title, note, id, children, wide }) {
  return html`<section class=${`card${wide ? " wide" : ""}`} aria-labelledby=${`${id}-title`} id=${id}>
    <header><h2 id=${`${id}-title`}>${title}</h2>${note && html`<p class="note">${note}</p>`}</header>
    ${children}
  </section>`;
}

const LEVELS = {
  HOT: "on its device, serving",
  WARM: "in CPU memory, back on its device in seconds",
  COLD: "on disk, loaded on demand",
};

export function Level({ level }) {
  return html`<span class=${`level ${level.toLowerCase()}`} title=${LEVELS[level]}>${level}</span>`;
}

const STATES = {
  RUNNING: ["serving", "good"],
  DEPLOYING: ["loading", "busy"],
  UNHEALTHY: ["failed", "bad"],
  "NOT DEPLOYED": ["not deployed", "idle"],
  COMPLETED: ["completed", "good"],
  ERROR: ["error", "bad"],
  CANCELLED: ["cancelled", "idle"],
  ENDED: ["ended", "bad"],
};
const MOVING = ["RECEIVED", "QUEUED", "DISPATCHED", "PROVISIONING"];

export function State({ state }) {
  const [word, tone] = STATES[state] ?? [
    state.toLowerCase().replaceAll("_", " "),
    MOVING.includes(state) ? "idle" : "busy",
  ];
  return html`<span class=${`state ${tone}`}>${word}</span>`;
}

export function JobState({ state }) {
  if (state === "ENDING") return html`<span class="state idle">ending</span>`;
  if (state === "RUNNING") return html`<span class="state busy">running</span>`;
  if (state === "DEPLOYING") return html`<span class="state idle">waiting: model loads</span>`;
  if (state === "PROVISIONING") return html`<span class="state idle">waiting: model is placed</span>`;
  return html`<${State} state=${state} />`;
}

export function Copy({ text, label, tabindex }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Browsers deny the clipboard to pages without TLS.
      const area = document.createElement("textarea");
      area.value = text;
      area.className = "off-screen";
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  };
  return html`<button type="button" class="copy" onClick=${copy} tabindex=${tabindex} aria-label=${`Copy ${label}`}>
    <span aria-live="polite">${copied ? "Copied" : "Copy"}</span>
  </button>`;
}

export function Code({ text, label }) {
  return html`<div class="code">
    <pre tabindex="0" role="group" aria-label=${label}><code>${text}</code></pre>
    <${Copy} text=${text} label=${label} />
  </div>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

export function KeyForm({ onKey, sentence }) {
  const field = useRef(null);
  const submit = (event) => {
    event.preventDefault();
    const given = field.current.value.trim();
    if (given) {
      useKey(given);
      onKey();
    }
  };
  return html`<form class="key" onSubmit=${submit}>
    <label for="api-key">API key</label>
    <div class="row">
      <input id="api-key" ref=${field} type="password" autocomplete="off" spellcheck=${false} required
        aria-describedby="api-key-note" />
      <button type="submit" class="primary">Use key</button>
    </div>
    <p class="note" id="api-key-note">The key stays in this tab until the tab is closed, and is sent only to this server.</p>
    ${sentence && html`<p class="problem" role="alert">${sentence}</p>`}
  </form>`;
}
