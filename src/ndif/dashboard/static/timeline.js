// The steps of one job, each as a bar over the time that it took.

import { html, useEffect, useState } from "./vendor/preact.js";
import { clock, duration } from "./format.js";
import { Empty } from "./parts.js";
import { ask } from "./session.js";

const AGAIN_MS = 5000;
const PARTS = ["gateway", "queue", "replica", "runner"];

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
  if (!trace.steps.length) return html`<${Empty}>No steps of this job were recorded.</${Empty}>`;
  const first = Math.min(...trace.steps.map((step) => step.start));
  const last = Math.max(first + 0.001, ...trace.steps.map((step) => step.end));
  const share = (seconds) => `${(100 * seconds) / (last - first)}%`;
  return html`<div class="timeline">
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
