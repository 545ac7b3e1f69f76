// The queue of each model, and its expected wait.

import { html } from "./vendor/preact.js";
import { ago, count, duration, plural } from "./format.js";
import { Card, Empty, useNow } from "./parts.js";

function waitOf(queue) {
  if (queue.wait_s === null) {
    const isServed = queue.replicas.some((each) => each.state === "RUNNING");
    return html`<span class="muted">${isServed ? "no job yet" : "not deployed"}</span>`;
  }
  return queue.wait_s < 1 ? "at once" : `about ${duration(queue.wait_s)}`;
}

export function Queues({ models }) {
  const moment = useNow(5000);
  const queues = models.flatMap((model) =>
    model.generations.filter((each) => each.processor !== null).map((each) => ({ model, ...each })),
  );
  queues.sort((a, b) => b.waiting - a.waiting || b.running - a.running
    || a.model.repo_id.localeCompare(b.model.repo_id));
  const waiting = queues.reduce((total, each) => total + each.waiting, 0);
  const most = Math.max(1, ...queues.map((each) => each.waiting));
  return html`<${Card} title="Queues" id="queues" note=${waiting ? `${plural(waiting, "job")} waiting` : "no job waiting"}>
    ${queues.length === 0
      ? html`<${Empty}>No model has had a job since the server started.</${Empty}>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Queues"><table class="stacks">
          <caption class="off-screen">Running and waiting jobs, by model</caption>
          <thead><tr>
            <th scope="col">Model</th><th scope="col" class="number">Running</th>
            <th scope="col" class="number">Waiting</th><th scope="col">A new job starts</th>
          </tr></thead>
          <tbody>${queues.map(
            (queue) => html`<tr key=${queue.model.key + queue.generation}>
              <th scope="row"><span class="name">${queue.model.repo_id}</span>
                <span class="note">nnsight ${queue.generation}</span></th>
              <td class="number" data-name="Running">${count(queue.running)}</td>
              <td class="number" data-name="Waiting"><div class="waiting"><span class="number">${count(queue.waiting)}</span>
                ${queue.waiting > 0 && html`<span class="track" aria-hidden="true"><span class="fill"
                  style=${{ width: `${(100 * queue.waiting) / most}%` }}></span></span>`}</div>
                ${queue.oldest !== null && html`<span class="note">oldest ${ago(queue.oldest, moment)}</span>`}</td>
              <td data-name="A new job">${waitOf(queue)}</td>
            </tr>`,
          )}</tbody>
        </table></div>`}
  </${Card}>`;
}
