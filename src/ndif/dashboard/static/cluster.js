// The nodes and the replicas in their memory.

import { html } from "./vendor/preact.js";
import { bytes, plural } from "./format.js";
import { Card, Empty } from "./parts.js";

const COLOURS = 8;

function Bar({ name, memory, colours, withdrawn }) {
  const used = memory.bytes - memory.free_bytes;
  const share = (count) => `${(100 * count) / Math.max(1, memory.bytes)}%`;
  const known = memory.held.reduce((total, each) => total + each.bytes, 0);
  const rest = used - known;
  const others = rest > memory.bytes / 200 ? rest : 0; // a smaller rest is a rounding error
  const groups = new Map();
  for (const each of memory.held) {
    const name = `${each.model}\n${each.level}`;
    const group = groups.get(name) ?? { ...each, bytes: 0, count: 0 };
    groups.set(name, { ...group, bytes: group.bytes + each.bytes, count: group.count + 1 });
  }
  const text = `${bytes(used)} of ${bytes(memory.bytes)}`;
  return html`<div class="device">
    <div class="row">
      <span class="device-name">${name}${withdrawn ? html` <span class="state bad">withdrawn</span>` : ""}</span>
      <span class="note">${text}</span>
    </div>
    <div class="bar" role="meter" aria-label=${name} aria-valuemin="0" aria-valuemax="100"
      aria-valuenow=${Math.round((100 * used) / Math.max(1, memory.bytes))} aria-valuetext=${text}>
      ${memory.held.map(
        (each) => html`<span key=${each.model + each.replica} class=${`part c${colours.get(each.model)}`}
          style=${{ width: share(each.bytes) }} title=${`${each.model}: ${bytes(each.bytes)}`}></span>`,
      )}
      ${others > 0 && html`<span class="part other" style=${{ width: share(others) }}></span>`}
    </div>
    ${memory.held.length > 0 && html`<ul class="held">
      ${[...groups].map(
        ([name, each]) => html`<li key=${name}>
          <span class=${`dot c${colours.get(each.model)}`} aria-hidden="true"></span>
          <span class="held-name">${each.model}${each.count > 1 ? html` <span class="note">× ${each.count}</span>` : ""}</span>
          <span class="note">${each.level === "WARM" ? "warm, " : ""}${each.bytes > 1 ? bytes(each.bytes) : "not measured"}</span>
        </li>`,
      )}
    </ul>`}
  </div>`;
}

export function Cluster({ nodes }) {
  const names = [...new Set(nodes.flatMap((node) => [...node.gpus, node.cpu]).flatMap(
    (memory) => memory.held.map((each) => each.model),
  ))].sort();
  const colours = new Map(names.map((name, index) => [name, index % COLOURS]));
  const gpus = nodes.reduce((total, node) => total + node.gpus.length, 0);
  const note = `${plural(nodes.length, "node")}, ${gpus ? plural(gpus, "GPU") : "no GPU"}`;
  return html`<${Card} title="Cluster" id="cluster" note=${note}>
    ${nodes.length === 0
      ? html`<${Empty}>No node is available at the moment.</${Empty}>`
      : nodes.map(
          (node) => html`<section class="node" key=${node.id} aria-label=${`Node ${node.name}`}>
            <h3>${node.name}</h3>
            <div class="devices">
              ${node.gpus.map(
                (gpu, index) => html`<${Bar} key=${index} name=${`GPU ${index}`} memory=${gpu}
                  withdrawn=${gpu.withdrawn} colours=${colours} />`,
              )}
              <${Bar} name="CPU memory" memory=${node.cpu} colours=${colours} />
            </div>
          </section>`,
        )}
  </${Card}>`;
}
