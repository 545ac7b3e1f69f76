// The steps of one job as bars over time, below the job's error or stored result.

import { html, useEffect, useState } from "./vendor/preact.js";
import { clock, duration } from "./format.js";
import { Empty } from "./parts.js";
import { ask } from "./session.js";

const AGAIN_MS = 5000;
const PARTS = ["gateway", "queue", "replica", "runner"];

/** The error of a failed job: its last line, and on demand the traceback. */
function Failure({ error }) {
  const lines = error.trimEnd().split("\n");
  return html`<div class="failure">
    <p class="problem">${lines.at(-1)}</p>
    ${lines.length > 1 && html`<details><summary>Traceback</summary><pre tabindex="0" role="group"
      aria-label="Traceback">${error}</pre></details>`}
  </div>`;
}

/** A button that downloads a stored result, and then shows how to read the file. */
function Download({ id }) {
  const [said, say] = useState("");
  const click = async () => {
    try {
      const { data } = await ask(`/response/${encodeURIComponent(id)}`);
      const link = document.createElement("a");
      // For older clients, the answer also has the size.
      link.href = Array.isArray(data) ? data[0] : data;
      if (!/^https?:$/.test(link.protocol)) throw new Error("The server has no address of this result.");
      // The store names the file, by its compression.
      link.download = "";
      link.click();
      say(html`Decompress a file that ends in .zst: <code>zstd -d ${id}.pt.zst</code>. Then${" "}
        <code>torch.load("${id}.pt", weights_only=False)</code> reads it.`);
    } catch (error) {
      say(error.message);
    }
  };
  return html`<div class="download">
    <button type="button" onClick=${click}>Download</button>
    <p class="note" role="status">${said}</p>
  </div>`;
}

export function Timeline({ job }) {
  const [trace, setTrace] = useState(null);
  const [sentence, setSentence] = useState("");
  useEffect(() => {
    let timer = 0;
    let isLeft = false;
    const read = async () => {
      try {
        const found = await ask(`/requests/${encodeURIComponent(job.id)}`);
        if (isLeft) return;
        setTrace(found);
        setSentence("");
        if (found.ended === null) timer = setTimeout(read, AGAIN_MS);
      } catch (error) {
        if (!isLeft) setSentence(error.message);
      }
    };
    read();
    return () => {
      isLeft = true;
      clearTimeout(timer);
    };
  }, [job.id, job.status]);
  if (sentence) return html`<p class="problem" role="alert">${sentence}</p>`;
  if (trace === null) return html`<${Empty}>Loading the steps…</${Empty}>`;
  const left = html`${trace.stored && html`<${Download} id=${trace.id} />`}
    ${trace.error && html`<${Failure} error=${trace.error} />`}
    ${trace.ended !== null && trace.stored === null && html`<p class="note">The server cannot reach its store of${" "}
      results now, so it does not know the result of this job. Open the timeline again in a moment.</p>`}`;
  if (!trace.steps.length) return html`<div class="timeline">${left}<${Empty}>No steps of this job were recorded.</${Empty}></div>`;
  const first = Math.min(...trace.steps.map((step) => step.start));
  const last = Math.max(first + 0.001, ...trace.steps.map((step) => step.end));
  const share = (seconds) => `${(100 * seconds) / (last - first)}%`;
  return html`<div class="timeline">
    ${left}
    <p class="note">${clock(first)}, ${duration(last - first)} in all${trace.ended === null ? " so far" : ""}. Job${" "}<code>${trace.id}</code></p>
    <table><caption class="off-screen">Steps of the job</caption>
      <thead><tr><th scope="col">Part</th><th scope="col">Step</th><th scope="col" class="number">Took</th>
        <th scope="col"><span class="off-screen">When</span></th></tr></thead>
      <tbody>${trace.steps.map((step, index) => html`<tr key=${index}>
        <td class="note">${step.by}</td>
        <td>${step.name}</td>
        <td class="number">${duration(Math.max(0, step.end - step.start))}</td>
        <td class="when"><span class=${`step c${PARTS.indexOf(step.by)}`} aria-hidden="true"
          style=${{ left: share(step.start - first), width: share(Math.max(0, step.end - step.start)) }}></span></td>
      </tr>`)}</tbody>
    </table>
  </div>`;
}
