// The API key of this tab, and requests with the key, which is never part of an address.

const NAME = "ndif-api-key";
let held = null;

export function key() {
  if (held === null) {
    try {
      held = sessionStorage.getItem(NAME) ?? "";
    } catch {
      held = "";
    }
  }
  return held;
}

export function useKey(given) {
  held = given;
  try {
    if (given) sessionStorage.setItem(NAME, given);
    else sessionStorage.removeItem(NAME);
  } catch {
    // Without storage, the key lasts until the page is closed.
  }
}

export class Refused extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

export async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers[NAME] = key();
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server cannot be reached.");
  }
  if (!answer.ok) {
    let sentence = `The server answered ${answer.status}.`;
    try {
      sentence = String((await answer.json()).detail ?? sentence);
    } catch {
      // The answer is a proxy's own.
    }
    throw new Refused(answer.status, sentence);
  }
  return answer;
}

export async function ask(path, options) {
  return (await send(path, options)).json();
}
