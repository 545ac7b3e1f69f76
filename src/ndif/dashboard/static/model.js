// The page of one model: its modules, its facts, and traces to paste.

import { html, useEffect, useState } from "./vendor/preact.js";
import { bytes, count, duration } from "./format.js";
import { Card, Code, Empty, Level, State } from "./parts.js";
import { ask } from "./session.js";
import { ModuleTree } from "./tree.js";

const AGAIN_MS = 5000; // until the tree is known

// The address of a model's page. A name contains no `@`, so `@` separates the revision.
export function addressOf(repoId, revision) {
  const name = repoId.split("/").map(encodeURIComponent).join("/");
  return `#/model/${name}${revision ? `@${encodeURIComponent(revision)}` : ""}`;
}

function routeOf(place, generation) {
  const [name, ...rest] = place.split("@");
  const query = new URLSearchParams();
  if (rest.length) query.set("revision", rest.join("@"));
  if (generation) query.set("generation", generation);
  return `/models/${name.split("/").map(encodeURIComponent).join("/")}?${query}`;
}

function isWeb(address) {
  return /^https?:\/\//.test(address ?? "");
}

function Facts({ model }) {
  const figures = [
    ["Parameters", count(model.parameters), model.dtype],
    ["Size", bytes(model.bytes), "to load"],
    ["Context", count(model.context_length), model.context_length === null ? "" : "tokens"],
    ["Layers", count(model.layers), model.heads === null ? "" : `${count(model.heads)} heads`],
    ["Hidden size", count(model.hidden_size), ""],
    ["Vocabulary", count(model.vocabulary), model.tokenizer ? "tokens" : model.tokenizer === false ? "no tokenizer" : ""],
  ];
  return html`<dl class="tiles" aria-label="Figures">${figures.map(([name, value, more]) => html`<div class="tile" key=${name}>
    <dt>${name}</dt><dd><span class="figure">${value}</span>${more && html`<span class="note">${more}</span>`}</dd></div>`)}</dl>`;
}

function Served({ model }) {
  return html`<${Card} title="Served" id="served">
    <dl class="limits">
      <div><dt>State</dt><dd><${State} state=${model.state} /> <${Level} level=${model.deployment_level} /></dd></div>
      ${model.generations.map((each) => html`<div key=${each}><dt>nnsight ${each}</dt><dd>${
        (model.replicas[each] ?? 0) > 0 ? `${count(model.replicas[each])} serving` : "loaded on demand"}${
        model.load_s[each] === undefined ? "" : `, last load ${duration(model.load_s[each])}`}</dd></div>`)}
      <div><dt>Kept</dt><dd>${model.dedicated ? "dedicated" : "until another model needs its memory"}</dd></div>
      ${model.adapters.length > 0 && html`<div><dt>Adapters</dt><dd>with nnsight ${model.adapters.join(", ")}</dd></div>`}
      <div><dt>Licence</dt><dd>${model.license ?? "not known"}</dd></div>
      ${model.gated && html`<div><dt>Access</dt><dd>gated or private on the hub</dd></div>`}
      ${isWeb(model.card) && html`<div><dt>Card</dt><dd><a href=${model.card} rel="noreferrer">${model.card}</a></dd></div>`}
    </dl>
  </${Card}>`;
}

function Generations({ generations, chosen, onChoose, name }) {
  if (generations.length < 2) return null;
  return html`<fieldset class="tabs"><legend class="off-screen">nnsight</legend>
    ${generations.map((each) => html`<label key=${each}>
      <input type="radio" name=${name} checked=${each === chosen} onChange=${() => onChoose(each)} />
      <span>nnsight ${each}</span></label>`)}
  </fieldset>`;
}

function Trace({ model, generation, onChoose }) {
  const generations = Object.keys(model.snippets);
  if (!generations.length) {
    return html`<${Card} title="A first trace" id="trace"><${Empty}>${model.tree
      ? "No trace is available, because this model does not take text alone."
      : "The trace appears once the model's modules are known."}</${Empty}></${Card}>`;
  }
  const one = generations.includes(generation) ? generation : generations[0];
  return html`<${Card} title="A first trace" id="trace" note="ready to be pasted">
    <${Generations} generations=${generations} chosen=${one} onChoose=${onChoose} name="trace-generation" />
    <${Code} text=${model.snippets[one]} label=${`the trace for nnsight ${one}`} />
  </${Card}>`;
}

export function Model({ place }) {
  const [generation, choose] = useState("");
  const [told, setTold] = useState({ place: null, model: null, sentence: "" });
  useEffect(() => {
    let isLeft = false;
    let timer = 0;
    const load = () =>
      ask(routeOf(place, generation)).then(
        (model) => {
          if (isLeft) return;
          setTold({ place, model, sentence: "" });
          document.title = `${model.repo_id} · ndif`;
          if (!model.tree) timer = setTimeout(load, AGAIN_MS);
        },
        (error) => isLeft || setTold({ place, model: null, sentence: error.message }),
      );
    load();
    return () => {
      isLeft = true;
      clearTimeout(timer);
    };
  }, [place, generation]);
  const { model, sentence } = told;
  if (told.place !== place) return html`<${Empty}>Loading the model…</${Empty}>`;
  if (!model) return html`<${Card} title="Model" id="model"><p class="problem" role="alert">${sentence}</p></${Card}>`;
  const paths = Object.keys(model.tree?.paths ?? {});
  const shown = paths.includes(generation) ? generation : model.generation;
  return html`
    <div class="title"><h2 class="model-name">${model.repo_id}</h2>
      <p class="note">${[model.revision && `@${model.revision}`, model.tree?.class, model.task].filter(Boolean).join(" · ")}</p></div>
    <${Facts} model=${model} />
    <div class="pair">
      <${Trace} model=${model} generation=${shown} onChoose=${choose} />
      <${Served} model=${model} />
    </div>
    ${model.tree
      ? html`<${ModuleTree} key=${`${place} ${model.generation}`} tree=${model.tree} generation=${shown} />`
      : html`<${Card} title="Modules" id="modules"><${Empty}>The modules are known once the model was measured or loaded,
        by its first job or by the server's operator.</${Empty}></${Card}>`}
  `;
}
