// A model's modules: a tree with search and keyboard navigation, and the chosen module.

import { html, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { count, plural } from "./format.js";
import { Card, Code, Copy } from "./parts.js";

const AT_FIRST = 16; // maximum number of rows that are open at first
const TYPING_MS = 700;

// A row stores its own step of the path, so that a path can lead through any of several equal modules.
function rowsOf(tree, generation) {
  const rows = [];
  const add = (node, key, parent, level) => {
    const path = node.paths[generation];
    const step = parent === null ? path : path.slice(parent.path.length);
    const row = { node, key, parent, level, path, step, children: [] };
    rows.push(row);
    node.children.forEach((child, place) => row.children.push(add(child, `${key}.${place}`, row, level + 1)));
    return row;
  };
  add(tree, "0", null, 1);
  return rows;
}

// The path of a row, with the chosen index of each container around it.
function pathOf(row, picked) {
  if (row.parent === null) return row.path;
  const index = picked[row.key];
  const step = index === undefined ? row.step : `[${index}]`;
  return pathOf(row.parent, picked) + step;
}

function has(row, index) {
  return row.node.indices.some(([first, last]) => first <= index && index <= last);
}

function runs(indices) {
  return indices.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

function shape(parameter) {
  return parameter.shape.length ? parameter.shape.map(count).join(" × ") : "scalar";
}

function opened(rows) {
  // Open level by level up to the maximum; the model's blocks come before leaves.
  const open = new Set();
  let shown = 1;
  const waiting = [rows[0]];
  while (waiting.length) {
    const row = waiting.shift();
    if (!row.children.length || shown + row.children.length > AT_FIRST) continue;
    open.add(row.key);
    shown += row.children.length;
    waiting.push(...row.children);
  }
  return open;
}

function found(rows, query) {
  const wanted = query.trim().toLowerCase();
  if (!wanted) return null;
  const shown = new Set();
  let number = 0;
  for (const row of rows) {
    const { node } = row;
    if (!`${row.path} ${node.class} ${node.name}`.toLowerCase().includes(wanted)) continue;
    // A path contains the paths of outer modules: a match is a module whose own name or class matches.
    if (row.parent && `${row.parent.path}`.toLowerCase().includes(wanted) && !`${row.step} ${node.class}`.toLowerCase().includes(wanted)) continue;
    number += 1;
    for (let each = row; each && !shown.has(each.key); each = each.parent) shown.add(each.key);
  }
  return { shown, number };
}

function Row({ row, picked, isOpen, isChosen, onChoose, onToggle, children }) {
  const { node } = row;
  const path = pathOf(row, picked);
  const label = row.parent === null ? path : row.step;
  return html`<li role="treeitem" aria-level=${row.level} aria-selected=${isChosen} data-key=${row.key}
      aria-expanded=${row.children.length ? isOpen : undefined} aria-label=${`${path}, ${node.class}`}
      tabindex=${isChosen ? 0 : -1}>
    <div class=${`module${isChosen ? " chosen" : ""}`} onClick=${() => onChoose(row)}>
      <span class=${`twist${row.children.length ? (isOpen ? " open" : "") : " leaf"}`} aria-hidden="true"
        onClick=${(event) => {
          event.stopPropagation();
          onToggle(row);
        }}></span>
      <span class="module-name"><code>${label}</code>
        ${node.number > 1 && html`<span class="alike" title=${`Indices ${runs(node.indices)}`}>${count(node.number)} alike</span>`}
        <span class="module-class">${node.class}</span></span>
      <span class="module-count number">${node.count ? count(node.count) : ""}</span>
      <${CopyPath} path=${path} tabindex=${isChosen ? 0 : -1} />
    </div>
    ${children}
    ${isOpen && node.omitted > 0 && html`<p class="note omitted">${plural(node.omitted, "more module")} not listed</p>`}
  </li>`;
}

function CopyPath({ path, tabindex }) {
  return html`<span class="copy-path" onClick=${(event) => event.stopPropagation()}>
    <${Copy} text=${path} label=${`the path ${path}`} tabindex=${tabindex} /></span>`;
}

function Chosen({ row, picked, onPick, generation }) {
  const { node } = row;
  const path = pathOf(row, picked);
  const renamed = Object.entries(node.renamed[generation] ?? {});
  const value = node.renamed[generation]?.output ?? "output";
  const containers = [];
  for (let each = row; each; each = each.parent) if (each.node.number > 1) containers.unshift(each);
  return html`<div class="chosen-module" aria-live="polite">
    <h3>${node.class}</h3>
    <${Code} text=${path} label="the path of the module" />
    ${containers.map((each) => html`<label class="pick-index" key=${each.key}>
      <span>Which of the ${count(each.node.number)} <code>${each.node.class}</code> (${runs(each.node.indices)})</span>
      <input type="number" min=${each.node.indices[0][0]} max=${each.node.indices.at(-1)[1]}
        value=${picked[each.key] ?? each.node.indices[0][0]}
        onInput=${(event) => {
          const index = event.target.valueAsNumber;
          if (Number.isInteger(index) && has(each, index)) onPick(each, index);
        }} /></label>`)}
    <p class="note">Its output, in a trace:</p>
    <${Code} text=${`saved = ${path}.${value}.save()`} label="the line that saves the module's output" />
    ${renamed.map(([name, other]) => html`<p class="note" key=${name}>nnsight ${generation} reads its <code>.${name}</code> as
      <code>.${other}</code>, because a module below it has that name.</p>`)}
    ${node.parameters.length > 0 && html`<table><caption class="off-screen">The module's own parameters</caption>
      <thead><tr><th scope="col">Parameter</th><th scope="col">Shape</th><th scope="col">Type</th></tr></thead>
      <tbody>${node.parameters.map((each) => html`<tr key=${each.name}>
        <th scope="row"><code>${each.name}</code></th><td class="shape">${shape(each)}</td><td>${each.dtype}</td></tr>`)}</tbody></table>`}
    <p class="note">${node.count
      ? `${plural(node.count, "parameter")}${node.children.length ? " with the modules below it" : ""}${node.number > 1 ? ", each" : ""}.`
      : "The module has no parameters."}</p>
  </div>`;
}

export function ModuleTree({ tree, generation }) {
  const rows = useMemo(() => rowsOf(tree, generation), [tree, generation]);
  const byKey = useMemo(() => new Map(rows.map((row) => [row.key, row])), [rows]);
  const [open, setOpen] = useState(() => opened(rows));
  const [chosenKey, setChosen] = useState("0");
  const [picked, setPicked] = useState({});
  const [query, setQuery] = useState("");
  const list = useRef(null);
  const typed = useRef({ text: "", at: 0 });
  const moves = useRef(false);
  const match = useMemo(() => found(rows, query), [rows, query]);
  const isShown = (row) => match === null || match.shown.has(row.key);
  const isOpen = (row) => row.children.length > 0 && (match !== null ? row.children.some(isShown) || open.has(row.key) : open.has(row.key));
  const visible = [];
  const show = (row) => {
    visible.push(row);
    if (isOpen(row)) row.children.filter(isShown).forEach(show);
  };
  show(rows[0]);
  const wanted = byKey.get(chosenKey) ?? rows[0];
  const chosen = visible.includes(wanted) ? wanted : visible[0];

  // Move the focus before the next key press.
  useLayoutEffect(() => {
    if (!moves.current) return;
    moves.current = false;
    list.current?.querySelector(`[data-key="${chosen.key}"]`)?.focus();
  });

  const choose = (row) => {
    moves.current = true;
    setChosen(row.key);
  };
  const toggle = (row, to = !isOpen(row)) => {
    const next = new Set(open);
    if (to) next.add(row.key);
    else next.delete(row.key);
    setOpen(next);
  };
  const type = (letter) => {
    const now = Date.now();
    typed.current = { text: (now - typed.current.at < TYPING_MS ? typed.current.text : "") + letter, at: now };
    const start = visible.indexOf(chosen) + (typed.current.text.length === 1 ? 1 : 0);
    const around = [...visible.slice(start), ...visible.slice(0, start)];
    const next = around.find((row) => row.node.name.toLowerCase().startsWith(typed.current.text));
    if (next) choose(next);
  };
  const onKeyDown = (event) => {
    if (event.target.tagName === "BUTTON" || event.ctrlKey || event.metaKey || event.altKey) return;
    const place = visible.indexOf(chosen);
    const moved = {
      ArrowDown: () => visible[place + 1],
      ArrowUp: () => visible[place - 1],
      Home: () => visible[0],
      End: () => visible.at(-1),
      ArrowLeft: () => (isOpen(chosen) && match === null ? toggle(chosen, false) : chosen.parent),
      ArrowRight: () => (isOpen(chosen) ? chosen.children.find(isShown) : chosen.children.length ? toggle(chosen, true) : null),
      Enter: () => (chosen.children.length ? toggle(chosen) : null),
      " ": () => (chosen.children.length ? toggle(chosen) : null),
    }[event.key];
    if (moved) {
      event.preventDefault();
      const next = moved();
      if (next) choose(next);
    } else if (event.key.length === 1) {
      type(event.key.toLowerCase());
    }
  };
  const branch = (row) => html`<${Row} key=${row.key} row=${row} picked=${picked} isOpen=${isOpen(row)}
      isChosen=${row === chosen} onChoose=${choose} onToggle=${toggle}>
    ${isOpen(row) && html`<ul role="group">${row.children.filter(isShown).map(branch)}</ul>`}
  </${Row}>`;
  const isWhole = rows.every((row) => !row.children.length || open.has(row.key));
  return html`<${Card} title="Modules" id="modules" note=${`as nnsight ${generation} names them`}>
    <div class="tree-tools">
      <label class="off-screen" for="module-search">Search modules by path or class</label>
      <input id="module-search" type="search" placeholder="Search paths and classes" autocomplete="off" spellcheck=${false}
        value=${query} onInput=${(event) => setQuery(event.target.value)} />
      <button type="button" onClick=${() => setOpen(isWhole ? new Set(["0"]) : new Set(rows.map((row) => row.key)))}>
        ${isWhole ? "Collapse all" : "Expand all"}</button>
      <span class="note" role="status">${match === null ? plural(rows.length, "structure") : plural(match.number, "match", "matches")}</span>
    </div>
    <div class="tree-pair">
      <ul role="tree" class="tree" aria-label="Modules" ref=${list} onKeyDown=${onKeyDown}>${branch(rows[0])}</ul>
      <${Chosen} row=${chosen} picked=${picked} generation=${generation}
        onPick=${(row, index) => setPicked({ ...picked, [row.key]: index })} />
    </div>
  </${Card}>`;
}
