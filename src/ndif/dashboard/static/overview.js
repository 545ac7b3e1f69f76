// The overview for all viewers: figures, models, nodes, queues, the last hours and the next days.

import { html } from "./vendor/preact.js";
import { Charts } from "./charts.js";
import { Cluster } from "./cluster.js";
import { bytes, count, duration, plural } from "./format.js";
import { Models } from "./models.js";
import { Empty } from "./parts.js";
import { Queues } from "./queues.js";
import { Schedule } from "./schedule.js";

function Tile({ name, value, more }) {
  return html`<div class="tile">
    <dt>${name}</dt>
    <dd><span class="figure">${value}</span>${more && html`<span class="note">${more}</span>`}</dd>
  </div>`;
}

function sum(list, of) {
  return list.reduce((total, each) => total + of(each), 0);
}

function Tiles({ models, nodes, history }) {
  const generations = models.flatMap((model) => model.generations);
  const hot = models.filter((model) => model.state === "RUNNING").length;
  const loading = models.filter((model) => model.state === "DEPLOYING").length;
  const running = sum(generations, (each) => each.running);
  const waiting = sum(generations, (each) => each.waiting);
  const replicas = sum(generations, (each) => each.replicas.filter((one) => one.state === "RUNNING").length);
  const devices = nodes.flatMap((node) => (node.gpus.length ? node.gpus : [node.cpu]));
  const total = sum(devices, (each) => each.bytes);
  const used = sum(devices, (each) => each.bytes - each.free_bytes);
  const last = history.intervals.slice(-12).filter(
    (each) => each.start >= history.since + 5 * 3600,
  );
  const jobs = sum(last, (each) => each.jobs);
  const errors = sum(last, (each) => each.errors);
  const timed = last.filter((each) => each.total_s);
  const weight = sum(timed, (each) => each.jobs);
  const median = weight ? sum(timed, (each) => each.total_s[0] * each.jobs) / weight : null;
  const isGpu = nodes.some((node) => node.gpus.length);
  return html`<dl class="tiles">
    <${Tile} name="Models serving" value=${count(hot)}
      more=${loading ? `${count(loading)} loading` : plural(replicas, "replica")} />
    <${Tile} name="Jobs running" value=${count(running)} more=${`${count(waiting)} waiting`} />
    <${Tile} name="Jobs, last hour" value=${count(jobs)}
      more=${errors ? plural(errors, "error") : "no errors"} />
    <${Tile} name="Median job" value=${median === null ? "–" : duration(median)} more="arrival to end" />
    <${Tile} name=${isGpu ? "GPU memory" : "Model memory"}
      value=${total ? `${Math.round((100 * used) / total)} %` : "–"} more=${total ? `of ${bytes(total)}` : ""} />
  </dl>`;
}

export function Overview({ parts }) {
  if (!parts.models) return html`<${Empty}>Loading the state of the server…</${Empty}>`;
  return html`
    ${parts.problems.length > 0 && html`<section class="problems" aria-label="Problems">
      <h2>${plural(parts.problems.length, "problem")}</h2>
      <ul>${parts.problems.map((sentence) => html`<li key=${sentence}>${sentence}</li>`)}</ul>
    </section>`}
    <${Tiles} models=${parts.models} nodes=${parts.nodes} history=${parts.history} />
    <${Models} models=${parts.models} />
    <${Cluster} nodes=${parts.nodes} />
    <div class="pair">
      <${Queues} models=${parts.models} />
      <div class="stack"><${Charts} history=${parts.history} /></div>
    </div>
    <${Schedule} windows=${parts.schedule} />
  `;
}
