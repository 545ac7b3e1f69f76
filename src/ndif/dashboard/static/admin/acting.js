// Parts of the operator's views: reads of a route, actions with a message, and questions for confirmation.

import { html, useCallback, useEffect, useRef, useState } from "../vendor/preact.js";
import { dayAndTime } from "../format.js";
import { ask } from "../login.js";
import { Empty } from "../parts.js";

const EVERY_MS = 5_000;
const CONFLICT = 409;

/**
 * Return the answer of a route and a function that reads it again. The route is read every five seconds while
 * the page is visible, and when `changed` changes.
 */
export function useReading(method, path, body, changed) {
  const [found, setFound] = useState({ answer: null, problem: "" });
  const asked = JSON.stringify([method, path, body ?? null]);
  const read = useCallback(async () => {
    const [how, where, what] = JSON.parse(asked);
    try {
      setFound({ answer: await ask(how, where, what), problem: "" });
    } catch (refused) {
      setFound((before) => ({ ...before, problem: refused.message, status: refused.status }));
    }
  }, [asked]);
  // A server without this feature will not have it in five seconds either.
  const isThere = found.status !== CONFLICT;
  useEffect(() => {
    if (!isThere) return undefined;
    read();
    const timer = setInterval(() => document.hidden || read(), EVERY_MS);
    return () => clearInterval(timer);
  }, [read, changed, isThere]);
  return { ...found, read };
}

/** Return a function that performs an operation, and the message about the last operation. */
export function useActions(after) {
  const [told, setTold] = useState({ kind: "", text: "" });
  const [busy, setBusy] = useState(false);
  async function act(path, body, words) {
    setBusy(true);
    setTold({ kind: "", text: "" });
    try {
      const answer = await ask("POST", path, body);
      const problem = answer.models?.map((each) => each.problem).find(Boolean);
      setTold(problem ? { kind: "problem", text: problem } : { kind: "done", text: words });
      return answer;
    } catch (refused) {
      setTold({ kind: "problem", text: refused.message });
      return null;
    } finally {
      setBusy(false);
      await after?.();
    }
  }
  return { act, told, busy };
}

/** The outcome of the last operation. */
export function Told({ told }) {
  return html`<div class="told">
    <p role="status" class="said">${told.kind === "done" ? told.text : ""}</p>
    <p role="alert" class="problem">${told.kind === "problem" ? told.text : ""}</p>
  </div>`;
}

/** Return a function that opens a dialog, and the dialog; the promise resolves with true on confirmation. */
export function useQuestion() {
  const [question, setQuestion] = useState(null);
  const dialog = useRef(null);
  useEffect(() => {
    if (question && !dialog.current.open) dialog.current.showModal();
  }, [question]);
  function answered() {
    question?.resolve(dialog.current.returnValue === "yes");
    setQuestion(null);
  }
  const confirm = (title, text, verb) =>
    new Promise((resolve) => {
      if (dialog.current) dialog.current.returnValue = "";
      setQuestion({ title, text, verb, resolve });
    });
  const shown = html`<dialog ref=${dialog} aria-labelledby="question-title" aria-describedby="question-text"
    onClose=${answered}>
    ${question &&
    html`<form method="dialog">
      <h2 id="question-title">${question.title}</h2>
      <p id="question-text">${question.text}</p>
      <menu>
        <button value="no" autofocus>Cancel</button>
        <button value="yes" class="danger">${question.verb}</button>
      </menu>
    </form>`}
  </dialog>`;
  return [confirm, shown];
}

/** A table whose cells are texts or components. */
export function Table({ caption, headings, rows, empty }) {
  if (rows.length === 0) return html`<${Empty}>${empty}</${Empty}>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table class="stacks">
      <caption class="off-screen">${caption}</caption>
      <thead><tr>${headings.map((each) => html`<th scope="col">${each}</th>`)}</tr></thead>
      <tbody>
        ${rows.map(
          ({ key, cells }) => html`<tr key=${key}>
            ${cells.map((cell, place) =>
              place === 0
                ? html`<th scope="row"><span class="name">${cell}</span></th>`
                : html`<td data-name=${headings[place]}>${cell}</td>`,
            )}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** A field of a form, below its label. */
export function Field({ name, label, help, ...more }) {
  const id = `field-${name}`;
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <input id=${id} name=${name} autocomplete="off" aria-describedby=${help ? `${id}-help` : undefined} ...${more} />
    ${help && html`<small id=${`${id}-help`}>${help}</small>`}
  </div>`;
}

/** A checkbox. */
export function Tick({ name, label, ...more }) {
  return html`<label class="tick"><input type="checkbox" name=${name} ...${more} /> ${label}</label>`;
}

export function time(moment) {
  return moment === null || moment === undefined ? "–" : dayAndTime(moment);
}
