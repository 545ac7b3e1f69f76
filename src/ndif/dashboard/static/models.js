// The server's models by level.

import { html } from "./vendor/preact.js";
import { ago, bytes, dayAndTime, duration, parameters, plural } from "./format.js";
import { addressOf } from "./model.js";
import { Card, Empty, Level, State, useNow } from "./parts.js";

const ORDER = ["HOT", "WARM", "COLD"];

function replicasOf(model) {
  const parts = model.generations
    .filter((each) => each.replicas.length || each.desired)
    .map((each) => ({
      generation: each.generation,
      ready: each.replicas.filter((one) => one.state === "RUNNING").length,
      warm: each.replicas.filter((one) => one.level === "WARM").length,
      desired: Math.max(each.desired, each.replicas.filter((one) => one.level === "HOT").length),
      loading: each.replicas.find((one) => one.total),
    }));
  if (!parts.length) return html`<span class="muted">none</span>`;
  return parts.map(
    (each) => html`<div key=${each.generation}>
      <span class="number">${[each.desired && `${each.ready} of ${each.desired}`, each.warm && `${each.warm} warm`]
        .filter(Boolean)
        .join(", ") || "none"}</span>
      <span class="muted"> nnsight ${each.generation}</span>
      ${each.loading && html`<progress max=${each.loading.total} value=${each.loading.done ?? 0}
        aria-label=${`Loading for nnsight ${each.generation}`}></progress>`}
    </div>`,
  );
}

function protection(model, moment) {
  if (model.dedicated && !(model.protected_until > moment)) return "dedicated";
  if (model.protected_until > moment) {
    const left = duration(model.protected_until - moment);
    return html`<span title=${dayAndTime(model.protected_until)}>for ${left}</span>`;
  }
  return html`<span class="muted">no</span>`;
}

function Row({ model, moment }) {
  const size = model.size_bytes === null ? null : bytes(model.size_bytes);
  return html`<tr>
    <th scope="row">
      <a class="name" href=${addressOf(model.repo_id, model.revision)}>${model.repo_id}</a>
      <span class="note">${[model.revision && `@${model.revision}`, model.task, parameters(model.parameters)]
        .filter(Boolean)
        .join(" · ")}</span>
      ${model.problems.map((sentence) => html`<span class="problem" key=${sentence}>${sentence}</span>`)}
    </th>
    <td data-name="Level" class="inline"><${Level} level=${model.level} /></td>
    <td data-name="State" class="inline"><${State} state=${model.state} /></td>
    <td data-name="Replicas">${replicasOf(model)}</td>
    <td data-name="Size" class="number">${size ?? html`<span class="muted">–</span>`}</td>
    <td data-name="Protected" class="brief">${protection(model, moment)}</td>
    <td data-name="Last used" class="brief">${model.last_used === null
      ? html`<span class="muted">not yet</span>`
      : ago(model.last_used, moment)}</td>
  </tr>`;
}

export function Models({ models }) {
  const moment = useNow(5000);
  const sorted = [...models].sort(
    (a, b) => ORDER.indexOf(a.level) - ORDER.indexOf(b.level) || a.repo_id.localeCompare(b.repo_id),
  );
  const counts = ORDER.map((level) => [level, models.filter((model) => model.level === level).length]);
  const note = counts.filter(([, number]) => number).map(([level, number]) => `${number} ${level}`).join(", ");
  return html`<${Card} title="Models" id="models" note=${note}>
    ${models.length === 0
      ? html`<${Empty}>No model is deployed or requested.</${Empty}>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Models"><table class="stacks">
          <caption class="off-screen">${plural(models.length, "model")} by level</caption>
          <thead><tr>
            <th scope="col">Model</th><th scope="col">Level</th><th scope="col">State</th>
            <th scope="col">Replicas</th><th scope="col" class="number">Size</th>
            <th scope="col">Protected</th><th scope="col">Last used</th>
          </tr></thead>
          <tbody>${sorted.map((model) => html`<${Row} key=${model.key} model=${model} moment=${moment} />`)}</tbody>
        </table></div>`}
  </${Card}>`;
}
