// The operator's view of models: deploy, scale, restart and evict them, and cancel jobs.

import { html, useState } from "../vendor/preact.js";
import { bytes, duration, plural } from "../format.js";
import { Card, Level, State } from "../parts.js";
import { Field, Table, Tick, Told, useActions, useQuestion, useReading } from "./acting.js";

const NUMBERS = ["replicas", "max_replicas", "threads", "padding_factor"];
const TEXTS = ["checkpoint", "revision", "task", "dtype", "device", "attn_implementation", "size_bytes", "padding_bytes", "execution_timeout_seconds"];
const FLAGS = ["dedicated", "trust_remote_code"];

/** Return the body of POST /admin/deploy for a form; the server chooses defaults for omitted fields. */
function deployment(form) {
  const given = new FormData(form);
  const entry = { repo_id: given.get("repo_id").trim() };
  for (const name of NUMBERS) if (given.get(name)) entry[name] = Number(given.get(name));
  for (const name of TEXTS) if (given.get(name)?.trim()) entry[name] = given.get(name).trim();
  for (const name of FLAGS) if (given.get(name)) entry[name] = true;
  return { deployments: [entry], generation: given.get("generation") || null, wait: false, sync: false };
}

function DeployForm({ generations, actions }) {
  const [asked, setAsked] = useState("");
  async function submit(event) {
    event.preventDefault();
    const form = event.currentTarget;
    const body = deployment(form);
    const { repo_id: name } = body.deployments[0];
    setAsked(name);
    const answer = await actions.act("/admin/deploy", body, `${name} is being deployed.`);
    setAsked("");
    if (answer !== null && !answer.models?.some((each) => each.problem)) form.reset();
  }
  return html`<${Card} title="Deploy a model" id="deploy"><form aria-labelledby="deploy-title" onSubmit=${submit}>
    <div class="fields">
      <${Field} name="repo_id" label="Model" placeholder="openai-community/gpt2" required maxlength="401"
        help="Repository on the hub, or a full model key" />
      <${Field} name="replicas" label="Replicas" type="number" min="1" max="1000" value="1" />
      <div class="field">
        <label for="field-generation">nnsight</label>
        <select id="field-generation" name="generation">
          <option value="">newest</option>
          ${generations.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
        </select>
      </div>
      <div class="field"><${Tick} name="dedicated" label="Dedicated: never evicted for another" /></div>
    </div>
    <details>
      <summary>More settings</summary>
      <div class="fields">
        <${Field} name="max_replicas" label="Replicas at most" type="number" min="1" max="1000" help="While requests wait" />
        <${Field} name="size_bytes" label="Size of the weights" placeholder="140GB" help="In place of the measured size" />
        <${Field} name="padding_factor" label="Padding factor" type="number" min="0" step="any" placeholder="0.15"
          help="Memory in addition to the weights, as a fraction of them" />
        <${Field} name="padding_bytes" label="Additional padding" placeholder="2GiB" />
        <${Field} name="execution_timeout_seconds" label="Maximum run time" placeholder="15m" />
        <${Field} name="dtype" label="dtype" placeholder="auto" />
        <${Field} name="device" label="Device" placeholder="auto" help="Such as cpu" />
        <${Field} name="attn_implementation" label="Attention" placeholder="eager" help="For requests that do not set it" />
        <${Field} name="threads" label="CPU threads" type="number" min="0" />
        <${Field} name="revision" label="Revision" placeholder="main" />
        <${Field} name="task" label="Task" placeholder="text-generation" />
        <${Field} name="checkpoint" label="Weights from" help="Another repository, or a folder on the server" />
        <div class="field"><${Tick} name="trust_remote_code" label="Run the repository's own code" /></div>
      </div>
    </details>
    <p><button class="primary" disabled=${actions.busy}>Deploy</button>
      <span role="status">${asked && ` Measuring ${asked}…`}</span></p>
  </form></${Card}>`;
}

const nameOf = (model) => (model.revision ? `${model.repo_id} (${model.revision})` : model.repo_id);
const stateOf = (model) => model.replicas.find((each) => each.level === "HOT")?.state ?? (model.problem ? "UNHEALTHY" : "NOT DEPLOYED");
const levelOf = (model) => model.replicas.map((each) => each.level).find((each) => each === "HOT") ?? model.replicas[0]?.level ?? "COLD";

/** The operator's actions on one model in one generation. */
function Buttons({ model, isOneOfSeveral, actions, confirm }) {
  const [count, setCount] = useState(null);
  const name = nameOf(model);
  const wanted = count ?? model.desired_replicas;
  async function scale(event) {
    event.preventDefault();
    if (wanted < model.desired_replicas &&
      !(await confirm(`Scale ${name} down?`, `It is scaled from ${plural(model.desired_replicas, "replica")} to ${wanted}. ` +
        "A removed replica finishes its job or returns it to the queue.", "Scale down"))) return;
    const body = { model: model.model_key, replicas: wanted, generation: model.generation };
    await actions.act("/admin/scale", body, `${name} is being scaled to ${plural(wanted, "replica")}.`);
    setCount(null);
  }
  const all = isOneOfSeveral ? " This applies to every nnsight generation of the model." : "";
  async function restart() {
    if (await confirm(`Restart ${name}?`, `Its replicas are replaced with new ones. Running jobs start again.${all}`, "Restart"))
      await actions.act("/admin/restart", { model: model.model_key }, `${name} is being restarted.`);
  }
  async function evict(cold) {
    const where = cold ? "its devices and the CPU memory" : "its devices and stays in CPU memory";
    if (await confirm(`Evict ${name}?`, `It leaves ${where}. Its waiting jobs end as an ERROR.${all}`, "Evict"))
      await actions.act("/admin/evict", { model: model.model_key, cold }, `${name} is evicted.`);
  }
  const off = actions.busy;
  return html`<div class="buttons">
    <form onSubmit=${scale}>
      <input type="number" min="0" max="1000" aria-label=${`Replicas of ${name}`} value=${wanted}
        onInput=${(event) => setCount(event.currentTarget.valueAsNumber || 0)} />
      <button disabled=${off} aria-label=${`Scale ${name}`}>Scale</button>
    </form>
    <button disabled=${off} aria-label=${`Restart ${name}`} onClick=${restart}>Restart</button>
    <button disabled=${off} aria-label=${`Evict ${name}`} onClick=${() => evict(false)}>Evict</button>
    <button disabled=${off} aria-label=${`Evict ${name} from memory`} onClick=${() => evict(true)}>Evict from memory</button>
  </div>`;
}

function Replicas({ model, nodes, actions, confirm }) {
  if (model.replicas.length === 0) return "none";
  async function evict(id) {
    if (await confirm(`Evict replica ${id} of ${model.repo_id}?`, "No other replica replaces it.", "Evict"))
      await actions.act("/admin/evict", { model: model.model_key, replica: id, cold: true }, `Replica ${id} is evicted.`);
  }
  return html`<ul class="plain">
    ${model.replicas.map((each) => {
      const loaded = each.state === "DEPLOYING" && each.total ? `${Math.floor((100 * each.done) / each.total)} %` : "";
      return html`<li key=${each.replica_id} class="buttons">
        <code>${each.replica_id.slice(0, 8)}</code><${Level} level=${each.level} /><span>${nodes[each.node_id] ?? each.node_id}</span>${loaded}
        <button class="small" disabled=${actions.busy} aria-label=${`Evict replica ${each.replica_id}`}
          onClick=${() => evict(each.replica_id)}>Evict</button>
      </li>`;
    })}
  </ul>`;
}

/** Models, replicas and jobs, with the operator's actions on them. */
export function Models({ changed, generations }) {
  const status = useReading("GET", "/admin/status", null, changed);
  const queue = useReading("GET", "/admin/queue", null, changed);
  const again = () => Promise.all([status.read(), queue.read()]);
  const actions = useActions(again);
  const [confirm, dialog] = useQuestion();
  const models = status.answer?.models ?? [];
  const nodes = Object.fromEntries((status.answer?.nodes ?? []).map((each) => [each.id, each.name]));
  async function evictAll() {
    if (await confirm("Evict every model?", "All models leave their devices, except models that the calendar has deployed. Their waiting jobs end as an ERROR.", "Evict all"))
      await actions.act("/admin/evict", { all: true, cold: false }, "Every model is evicted, except booked models.");
  }
  const rows = models.map((model) => ({
    key: `${model.model_key}@${model.generation}`,
    cells: [
      html`${nameOf(model)}${model.problem && html`<small class="problem">${model.problem}</small>`}`,
      model.generation ?? "–",
      html`<${Level} level=${levelOf(model)} />`,
      html`<${State} state=${stateOf(model)} />`,
      model.dedicated ? "yes" : "no",
      html`<span class="number">${bytes(model.size_bytes)}</span>`,
      model.waiting,
      html`<${Replicas} model=${model} nodes=${nodes} actions=${actions} confirm=${confirm} />`,
      html`<${Buttons} model=${model} isOneOfSeveral=${models.filter((each) => each.model_key === model.model_key).length > 1}
        actions=${actions} confirm=${confirm} />`,
    ],
  }));
  return html`<div class="views">
    <${Told} told=${actions.told} />
    ${status.problem && html`<p class="problem" role="alert">${status.problem}</p>`}
    <${DeployForm} generations=${generations} actions=${actions} />
    <${Card} title="Models" id="deployed">
      <${Table} caption="Models of this server" rows=${rows} empty=${status.answer ? "No model is deployed." : "Loading…"}
        headings=${["Model", "nnsight", "Level", "State", "Dedicated", "Size", "Waiting", "Replicas", "Change"]} />
      ${rows.length > 0 && html`<p><button disabled=${actions.busy} onClick=${evictAll}>Evict all…</button></p>`}
    </${Card}>
    <${Jobs} models=${queue.answer?.models} actions=${actions} confirm=${confirm} />
    ${dialog}
  </div>`;
}

function Jobs({ models, actions, confirm }) {
  async function kill(id) {
    if (await confirm(`End job ${id}?`, "Its user gets an ERROR that names the operator as the cause.", "End job"))
      await actions.act("/admin/kill", { request_id: id }, `Job ${id} is ended.`);
  }
  const now = Date.now() / 1000;
  const rows = (models ?? []).flatMap((model) => [
    ...model.running.map((job) => [model, job, "running", duration(now - job.since)]),
    ...model.waiting.map((job) => [model, job, `waiting, position ${job.position}`, duration(now - job.received)]),
  ]);
  return html`<${Card} title="Jobs" id="jobs">
    <${Table} caption="Waiting and running jobs" headings=${["Job", "User", "Model", "State", "For", "Change"]}
      empty=${models ? "No job is waiting or running." : "Loading…"}
      rows=${rows.map(([model, job, state, since]) => ({
        key: job.request_id,
        cells: [
          html`<code>${job.request_id.slice(0, 8)}</code>`,
          job.user,
          `${model.repo_id} (nnsight ${model.generation})`,
          state,
          since,
          html`<button disabled=${actions.busy} aria-label=${`End job ${job.request_id}`}
            onClick=${() => kill(job.request_id)}>End</button>`,
        ],
      }))} />
  </${Card}>`;
}
