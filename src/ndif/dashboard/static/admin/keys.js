// API keys and tiers: create, revoke and assign them. A new key is shown once.

import { html, useState } from "../vendor/preact.js";
import { Card, Code } from "../parts.js";
import { Field, Table, Tick, Told, time, useActions, useQuestion, useReading } from "./acting.js";

const DAY_S = 86_400;
const RIGHTS = ["hotswapping", "priority", "trusted", "gated"];
const MEANINGS = {
  hotswapping: "Models are loaded on demand",
  priority: "Requests are served before others of the same age",
  trusted: "Code runs without the sandbox",
  gated: "Gated models are loaded on demand",
};

function NewKey({ made, onDone }) {
  return html`<div class="new-key" role="status">
    <p>The new key${made.user ? html` of <strong>${made.user}</strong>` : ""}. Copy it now: the server cannot show it again.</p>
    <${Code} text=${made.api_key} label="the new key" />
    <p><button type="button" onClick=${onDone}>Done</button></p>
  </div>`;
}

function CreateForm({ tiers, actions, onMade }) {
  async function submit(event) {
    event.preventDefault();
    const form = event.currentTarget;
    const given = new FormData(form);
    const days = Number(given.get("days"));
    const body = {
      user: given.get("user").trim() || null,
      label: given.get("label").trim(),
      expires_in_s: days ? days * DAY_S : null,
      tiers: given.getAll("tiers"),
    };
    const made = await actions.act("/admin/keys/create", body, "The key is created.");
    if (made !== null) {
      onMade(made);
      form.reset();
    }
  }
  return html`<${Card} title="Create a key" id="make-key"><form aria-labelledby="make-key-title" onSubmit=${submit}>
    <div class="fields">
      <${Field} name="user" label="User" maxlength="320" placeholder="ada@example.org" />
      <${Field} name="label" label="Name of the key" maxlength="200" placeholder="notebook" />
      <${Field} name="days" label="Expires in days" type="number" min="1" max="36500" placeholder="never" />
    </div>
    ${tiers.length > 0 &&
    html`<fieldset><legend>Tiers</legend>
      ${tiers.map((each) => html`<${Tick} key=${each.name} name="tiers" value=${each.name} label=${each.name} />`)}
    </fieldset>`}
    <p><button class="primary" disabled=${actions.busy}>Create a key</button></p>
  </form></${Card}>`;
}

function KeyTiers({ row, tiers, actions }) {
  const others = tiers.map((each) => each.name).filter((name) => !row.tiers.includes(name));
  const assign = (event) => {
    const tier = event.currentTarget.value;
    event.currentTarget.value = "";
    if (tier) actions.act("/admin/tiers/assign", { tier, key: row.id }, `The key has the tier ${tier}.`);
  };
  const withdraw = (tier) => actions.act("/admin/tiers/withdraw", { tier, key: row.id }, `The key no longer has the tier ${tier}.`);
  return html`<div class="buttons">
    ${row.tiers.map((tier) => row.state !== "VALID" ? html`<span key=${tier} class="note">${tier}</span>` : html`<button key=${tier} class="small" disabled=${actions.busy}
      aria-label=${`Withdraw the tier ${tier} from key ${row.id}`} onClick=${() => withdraw(tier)}>${tier} ×</button>`)}
    ${row.state === "VALID" && others.length > 0 && html`<select aria-label=${`Assign a tier to key ${row.id}`} onChange=${assign} disabled=${actions.busy}>
      <option value="">add…</option>${others.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
    </select>`}
  </div>`;
}

function TierForm({ actions }) {
  async function submit(event) {
    event.preventDefault();
    const form = event.currentTarget;
    const given = new FormData(form);
    const limits = {};
    if (given.get("requests_per_minute")) limits.requests_per_minute = Number(given.get("requests_per_minute"));
    if (given.get("unfinished_jobs")) limits.unfinished_jobs = Number(given.get("unfinished_jobs"));
    const body = {
      tier: given.get("tier").trim(),
      weight: Number(given.get("weight") || 1),
      limits: Object.keys(limits).length > 0 ? limits : null,
      ...Object.fromEntries(RIGHTS.map((right) => [right, given.has(right)])),
    };
    if ((await actions.act("/admin/tiers/create", body, `The tier ${body.tier} is created.`)) !== null) form.reset();
  }
  return html`<${Card} title="Create a tier" id="make-tier"><form aria-labelledby="make-tier-title" onSubmit=${submit}>
    <div class="fields">
      <${Field} name="tier" label="Tier" required maxlength="64" />
      <${Field} name="weight" label="Share of a model" type="number" min="0.001" max="1000" step="any" placeholder="1" />
      <${Field} name="requests_per_minute" label="Requests per minute" type="number" min="1" />
      <${Field} name="unfinished_jobs" label="Unfinished jobs" type="number" min="1" />
    </div>
    <fieldset><legend>Rights</legend>
      ${RIGHTS.map((right) => html`<${Tick} key=${right} name=${right} label=${`${right}: ${MEANINGS[right]}`} />`)}
    </fieldset>
    <p><button class="primary" disabled=${actions.busy}>Create a tier</button></p>
  </form></${Card}>`;
}

/** Keys and tiers, with the operator's actions on them. */
export function Keys() {
  const keys = useReading("GET", "/admin/keys");
  const tiers = useReading("GET", "/admin/tiers");
  const actions = useActions(() => Promise.all([keys.read(), tiers.read()]));
  const [confirm, dialog] = useQuestion();
  const [made, setMade] = useState(null);
  const all = tiers.answer?.tiers ?? [];
  if (keys.problem && keys.answer === null) return html`<p class="problem" role="alert">${keys.problem}</p>`;
  async function revoke(row) {
    if (await confirm(`Revoke the key ${row.id}${row.user ? ` of ${row.user}` : ""}?`, "The key becomes permanently invalid. Its jobs end as an ERROR.", "Revoke"))
      await actions.act("/admin/keys/revoke", { key: row.id }, `The key ${row.id} is revoked.`);
  }
  async function remove(tier) {
    if (await confirm(`Delete the tier ${tier}?`, "A tier that keys have cannot be deleted.", "Delete"))
      await actions.act("/admin/tiers/delete", { tier }, `The tier ${tier} is deleted.`);
  }
  const rows = (keys.answer?.keys ?? []).toReversed().map((row) => ({
    key: row.id,
    cells: [
      html`<code>${row.id}</code>`,
      row.user ?? "–",
      row.name || "–",
      row.state,
      html`<${KeyTiers} row=${row} tiers=${all} actions=${actions} />`,
      time(row.created),
      row.expires === null ? "never" : time(row.expires),
      row.last_used === null ? "never" : time(row.last_used),
      row.state === "VALID" ? html`<button disabled=${actions.busy} aria-label=${`Revoke key ${row.id}`} onClick=${() => revoke(row)}>Revoke</button>` : "",
    ],
  }));
  return html`<div class="views">
    <${Told} told=${actions.told} />
    ${made && html`<${NewKey} made=${made} onDone=${() => setMade(null)} />`}
    <${CreateForm} tiers=${all} actions=${actions} onMade=${setMade} />
    <${Card} title="Keys" id="keys">
      <${Table} caption="API keys, newest first" rows=${rows} empty=${keys.answer ? "No key exists." : "Loading…"}
        headings=${["Key", "User", "Name", "State", "Tiers", "Created", "Expires", "Last used", "Change"]} />
    </${Card}>
    <${TierForm} actions=${actions} />
    <${Card} title="Tiers" id="tiers">
      <${Table} caption="Tiers" empty=${tiers.answer ? "No tier exists." : "Loading…"}
        headings=${["Tier", "Rights", "Share", "Limits", "Keys", "Change"]}
        rows=${all.map((tier) => ({
          key: tier.name,
          cells: [
            tier.name,
            RIGHTS.filter((right) => tier[right]).join(", ") || "none",
            tier.weight,
            Object.entries(tier.limits ?? {}).filter(([, value]) => value !== null).map(([name, value]) => `${name}: ${value}`).join(", ") || "the server's",
            tier.keys,
            tier.keys === 0 ? html`<button disabled=${actions.busy} aria-label=${`Delete tier ${tier.name}`} onClick=${() => remove(tier.name)}>Delete</button>` : "",
          ],
        }))} />
    </${Card}>
    ${dialog}
  </div>`;
}
