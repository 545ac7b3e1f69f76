// The state of the server from its event stream. EventSource sends no headers, so the stream is read with fetch.

import { key, send, useKey } from "./session.js";

const RETRY_MS = [1000, 2000, 5000, 10000];
const SILENCE_MS = 40000;

/** Facts in the page itself, for viewers who may not see the state. */
const facts = { server: JSON.parse(document.documentElement.dataset.server) };

export const live = {
  parts: facts,
  status: "connecting", // connecting, live, away, refused
  sentence: "",
  keyProblem: "", // reason why the last entered key is not used
  skew: 0, // seconds by which this machine's clock is ahead of the server's
};
const listeners = new Set();
let stop = () => {};
let failures = 0;
let timer = 0;

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function now() {
  return Date.now() / 1000 - live.skew;
}

function tell() {
  for (const listener of listeners) listener();
}

function become(status, sentence = "") {
  live.status = status;
  live.sentence = sentence;
  tell();
}

/**
 * Begin to follow the state; `anew` for another viewer, who must not see the previous viewer's state.
 * `keyProblem` is the reason why this viewer's key is not used.
 */
export function connect({ anew = false, keyProblem = "" } = {}) {
  stop();
  clearTimeout(timer);
  if (anew) {
    live.parts = facts;
    live.keyProblem = keyProblem;
    become("connecting");
  }
  const leaving = new AbortController();
  stop = () => leaving.abort();
  follow(leaving).then(
    () => leaving.signal.aborted || again("The server ended the connection."),
    (error) => leaving.signal.aborted || failed(error),
  );
}

function failed(error) {
  if (error.status === 401 && key()) {
    // A wrong key does not hide the state that viewers without a key may see.
    useKey("");
    connect({ anew: true, keyProblem: error.message });
    return;
  }
  if (error.status === 401 || error.status === 429) {
    live.parts = facts;
    become("refused", error.message);
    if (error.status === 429) again(error.message, "refused");
    return;
  }
  again(error.message || "The server cannot be reached.");
}

function again(sentence, status = "away") {
  become(status, sentence);
  timer = setTimeout(() => connect(), RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
  failures += 1;
}

async function follow(leaving) {
  const answer = await send("/dashboard/events", { signal: leaving.signal });
  const date = Date.parse(answer.headers.get("date") ?? "");
  const skew = Date.now() / 1000 - date / 1000;
  // The header is precise only to seconds.
  live.skew = Number.isFinite(skew) && Math.abs(skew) > 2 ? skew : 0;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let silence = 0;
  try {
    for (;;) {
      clearTimeout(silence);
      silence = setTimeout(() => reader.cancel(), SILENCE_MS);
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      let changed = false;
      for (const event of events) changed = take(event) || changed;
      if (changed) tell();
    }
  } finally {
    clearTimeout(silence);
  }
}

function take(event) {
  let name = "";
  let data = "";
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (!name) return false;
  const value = JSON.parse(data);
  if (name === "away") {
    live.status = "away";
    live.sentence = value.detail;
    return true;
  }
  live.parts = { ...live.parts, [name]: value };
  live.status = "live";
  live.sentence = "";
  failures = 0;
  return true;
}
