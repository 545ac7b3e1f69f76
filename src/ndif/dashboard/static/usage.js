// The viewer's usage and limits.

import { html, useEffect, useState } from "./vendor/preact.js";
import { bytes, count, duration } from "./format.js";
import { Card, Empty } from "./parts.js";
import { ask } from "./session.js";

const LIMITS = [
  ["requests_per_minute", "Jobs sent per minute", count],
  ["unfinished_jobs", "Unfinished jobs at once", count],
  ["channels", "Live channels at once", count],
  ["request_bytes", "Size of a request", bytes],
  ["result_bytes", "Size of a result", bytes],
  ["stored_bytes", "Size of all stored results", bytes],
  ["execution_s_per_day", "Run time per day (UTC)", duration],
];

export function Usage({ me, jobs }) {
  const [by, setBy] = useState("model");
  const [rows, setRows] = useState(null);
  const [sentence, setSentence] = useState("");
  const unfinished = jobs.length;
  useEffect(() => {
    let isLeft = false;
    ask(`/usage?by=${by}`).then(
      (found) => isLeft || (setRows(found.usage), setSentence("")),
      (error) => isLeft || setSentence(error.message),
    );
    return () => {
      isLeft = true;
    };
  }, [by, unfinished === 0]);
  const limits = LIMITS.filter(([name]) => me.limits?.[name] !== null && me.limits?.[name] !== undefined);
  return html`<div class="pair">
    <${Card} title="My usage" id="usage">
      <fieldset class="tabs"><legend class="off-screen">Sum for each</legend>
        ${["model", "day"].map((each) => html`<label key=${each}>
          <input type="radio" name="by" checked=${by === each} onChange=${() => setBy(each)} />
          <span>by ${each}</span></label>`)}
      </fieldset>
      ${sentence && html`<p class="problem" role="alert">${sentence}</p>`}
      ${rows?.length
        ? html`<div class="scroll" tabindex="0" role="region" aria-label="My usage"><table class="stacks">
            <caption class="off-screen">Ended jobs, by ${by}</caption>
            <thead><tr><th scope="col">${by === "day" ? "Day" : "Model"}</th><th scope="col" class="number">Jobs</th>
              <th scope="col" class="number">Errors</th><th scope="col" class="number">Run time</th>
              <th scope="col" class="number">Results</th></tr></thead>
            <tbody>${rows.map((row) => html`<tr key=${row.name}><th scope="row"><span class="name">${row.name}</span></th>
              <td class="number" data-name="Jobs">${count(row.jobs)}</td><td class="number" data-name="Errors">${count(row.errors)}</td>
              <td class="number" data-name="Run time">${duration(row.execution_s)}</td><td class="number" data-name="Results">${bytes(row.result_bytes)}</td></tr>`)}</tbody>
          </table></div>`
        : html`<${Empty}>${rows === null ? "Loading…" : "None of your jobs has ended yet."}</${Empty}>`}
    </${Card}>
    <${Card} title="My limits" id="limits" note=${me.email ?? ""}>
      ${limits.length
        ? html`<dl class="limits">${limits.map(([name, text, format]) => html`<div key=${name}>
            <dt>${text}</dt><dd>${format(me.limits[name])}${name === "unfinished_jobs" ? `, ${count(unfinished)} used` : ""}</dd></div>`)}
            ${me.tags?.length > 0 && html`<div><dt>Rights</dt><dd>${me.tags.join(", ")}</dd></div>`}</dl>`
        : html`<${Empty}>Your jobs have no limits.</${Empty}>`}
    </${Card}>
  </div>`;
}
