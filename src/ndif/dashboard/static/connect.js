// The lines that connect a client, for each installed nnsight generation.

import { html, useState } from "./vendor/preact.js";
import { Card, Code, Empty } from "./parts.js";

const QUOTED = /["\\\n]/g;

function linesOf(generation, model, needsKey) {
  const origin = location.origin;
  const name = (model ?? "ORG/MODEL").replace(QUOTED, "");
  const isNew = !["0.6", "0.7"].includes(generation);
  const key = needsKey ? `\nexport NDIF_API_KEY=YOUR_KEY` : "";
  const trace = isNew
    ? `from nnsight import TransformersModel

model = TransformersModel("${name}")
with model.trace("The Eiffel Tower is in", remote=True):
    logits = model.output.logits.save()
print(logits.shape)`
    : `from nnsight import CONFIG, LanguageModel

CONFIG.API.HOST = "${origin}"${needsKey ? `\nCONFIG.API.APIKEY = "YOUR_KEY"` : `\nCONFIG.API.APIKEY = ""`}

model = LanguageModel("${name}")
with model.trace("The Eiffel Tower is in", remote=True):
    logits = model.output.logits.save()
print(logits.shape)`;
  return {
    shell: `export NDIF_HOST=${origin}${key}`,
    hub: `export HF_ENDPOINT=${origin}/hub`,
    trace,
  };
}

export function Connect({ parts }) {
  const generations = parts.server?.generations ?? [];
  const models = (parts.models ?? []).filter((each) => each.level === "HOT").map((each) => each.repo_id);
  const [chosen, choose] = useState("");
  const [picked, pick] = useState("");
  if (!generations.length) {
    return html`<${Card} title="Connect" id="connect"><${Empty}>${parts.server
      ? "No nnsight is installed on this server."
      : "Loading the installed generations…"}</${Empty}></${Card}>`;
  }
  const one = generations.find((each) => each.generation === chosen) ?? generations[0];
  const model = models.includes(picked) ? picked : models[0];
  const lines = linesOf(one.generation, model, parts.server.needs_key);
  return html`<${Card} title="Connect" id="connect" note="from your machine to this server">
    <div class="choices">
      <fieldset><legend>nnsight</legend>
        ${generations.map((each) => html`<label key=${each.generation}>
          <input type="radio" name="generation" checked=${each === one} onChange=${() => choose(each.generation)} />
          <span>${each.generation}</span></label>`)}
      </fieldset>
      ${models.length > 1 && html`<label class="pick">Model
        <select onChange=${(event) => pick(event.target.value)} value=${model}>
          ${models.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
        </select></label>`}
    </div>
    <ol class="steps">
      <li><h3>Install the client</h3>
        <${Code} text=${`pip install "${one.requirement}"`} label="the line that installs the client" />
        <p class="note">The server runs nnsight ${one.version} for this client.</p></li>
      <li><h3>Name the server</h3>
        <${Code} text=${lines.shell} label="the lines that name the server" />
        ${parts.server.needs_key && html`<p class="note">Replace YOUR_KEY with your API key, which the server's operator gives you.</p>`}
        <details><summary>Is huggingface.co unreachable from your machine?</summary>
          <p class="note">The server also provides the configurations and tokenizers of its models.</p>
          <${Code} text=${lines.hub} label="the line that names the mirror" /></details></li>
      <li><h3>Run a trace</h3>
        <${Code} text=${lines.trace} label="a first trace" /></li>
    </ol>
    <p class="note">Every route is described at <a href="/docs">/docs</a>.</p>
  </${Card}>`;
}
