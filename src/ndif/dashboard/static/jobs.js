// The viewer's jobs: unfinished jobs are live; ended jobs are requested again when a job ends.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { ago, bytes, duration, plural } from "./format.js";
import { connect } from "./live.js";
import { Card, Empty, JobState, KeyForm, useNow } from "./parts.js";
import { ask, key } from "./session.js";
import { Timeline } from "./timeline.js";
import { Usage } from "./usage.js";

const SHOWN = 50;
const PAUSE_MS = 5000;

/** Ended jobs, which are read again when the unfinished jobs change, at most every 5 s. */
function useEnded(unfinished) {
  const [ended, setEnded] = useState(null);
  const [sentence, setSentence] = useState("");
  const ids = unfinished.map((job) => job.id).sort().join();
  const last = useRef(0);
  useEffect(() => {
    let isLeft = false;
    const read = async () => {
      last.current = Date.now();
      try {
        const { requests } = await ask(`/requests?limit=${SHOWN}`);
        if (!isLeft) {
          setEnded(requests.filter((job) => job.ended !== null));
          setSentence("");
        }
      } catch (error) {
        if (!isLeft) setSentence(error.message);
      }
    };
    const timer = setTimeout(read, Math.max(0, last.current + PAUSE_MS - Date.now()));
    return () => {
      isLeft = true;
      clearTimeout(timer);
    };
  }, [ids]);
  return [ended, sentence];
}

function Cancel({ job, tell }) {
  const [step, setStep] = useState("");
  const click = async () => {
    if (step !== "sure") {
      setStep("sure");
      setTimeout(() => setStep((now) => (now === "sure" ? "" : now)), 5000);
      return;
    }
    setStep("sent");
    try {
      await ask(`/request/${encodeURIComponent(job.id)}`, { method: "DELETE" });
      tell(`The job ${job.id.slice(0, 8)} is ended.`);
    } catch (error) {
      tell(error.message);
      setStep("");
    }
  };
  return html`<button type="button" class=${step === "sure" ? "danger" : ""} onClick=${click} disabled=${step === "sent"}>
    ${{ "": "Cancel", sure: "End the job?", sent: "Ending…" }[step]}
  </button>`;
}

function timesOf(job, moment) {
  if (job.ended === null) {
    if (job.dispatched !== null) return `running for ${duration(Math.max(0, moment - job.dispatched))}`;
    const place = job.position ? `number ${job.position}` : "waiting";
    return job.expected_start_s === null ? place : `${place}, starts in ${duration(job.expected_start_s)}`;
  }
  const waited = (job.dispatched ?? job.ended) - job.received;
  const ran = job.execution_s ? `, ran ${duration(job.execution_s)}` : "";
  return `waited ${duration(waited)}${ran}`;
}

function Row({ job, moment, open, toggle, tell }) {
  const isOpen = open === job.id;
  return html`<tr class=${isOpen ? "is-open" : ""}>
      <th scope="row"><code class="id" title=${job.id}>${job.id.slice(0, 8)}</code>
        <span class="note">${ago(job.received, moment)}</span></th>
      <td data-name="Model" class="inline"><span class="name">${job.model}</span> <span class="note">nnsight ${job.generation}</span></td>
      <td data-name="State" class="inline"><${JobState} state=${job.status} /></td>
      <td data-name="Times">${timesOf(job, moment)}</td>
      <td data-name="Result" class="number">${job.result_bytes ? bytes(job.result_bytes) : html`<span class="muted">–</span>`}</td>
      <td class="actions">
        <button type="button" aria-expanded=${isOpen} onClick=${() => toggle(isOpen ? "" : job.id)}>Timeline</button>
        ${job.ended === null && job.status !== "ENDING" && html`<${Cancel} job=${job} tell=${tell} />`}
      </td>
    </tr>
    ${isOpen && html`<tr class="below"><td colspan="6"><${Timeline} job=${job} /></td></tr>`}`;
}

function OwnJobs({ parts }) {
  const moment = useNow(1000);
  const unfinished = parts.jobs ?? [];
  const [ended, sentence] = useEnded(unfinished);
  const [open, toggle] = useState("");
  const [said, tell] = useState("");
  const seen = useRef(new Map());
  const jobs = useMemo(() => {
    const live = new Set(unfinished.map((job) => job.id));
    const told = (ended ?? []).filter((job) => !live.has(job.id));
    // A job that has just ended keeps its row until the server reports its outcome.
    for (const { id } of told) seen.current.delete(id);
    const ending = [...seen.current.values()].filter((job) => !live.has(job.id));
    for (const job of unfinished) seen.current.set(job.id, { ...job, status: "ENDING" });
    return [...unfinished, ...ending, ...told];
  }, [unfinished, ended]);
  const note = unfinished.length ? `${plural(unfinished.length, "job")} not ended` : "";
  return html`<${Card} title="My jobs" id="jobs" note=${note}>
    <p class="said" role="status">${said}</p>
    ${sentence && html`<p class="problem" role="alert">${sentence}</p>`}
    ${jobs.length === 0
      ? html`<${Empty}>${ended === null ? "Loading…" : "You have no jobs here yet. Connect shows the lines for a first job."}</${Empty}>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="My jobs"><table class="stacks">
          <caption class="off-screen">Your jobs, unfinished jobs first</caption>
          <thead><tr><th scope="col">Job</th><th scope="col">Model</th><th scope="col">State</th>
            <th scope="col">Times</th><th scope="col" class="number">Result</th>
            <th scope="col"><span class="off-screen">Actions</span></th></tr></thead>
          <tbody>${jobs.map((job) => html`<${Row} key=${job.id} job=${job} moment=${moment} open=${open}
            toggle=${toggle} tell=${tell} />`)}</tbody>
        </table></div>`}
  </${Card}>`;
}

export function Jobs({ parts, sentence }) {
  if (!parts.me?.known) {
    return html`<${Card} title="My jobs" id="jobs">
      <p>Enter your API key to see your jobs, their timelines and your usage.</p>
      ${key() && parts.me && html`<p class="problem" role="alert">This server has no API keys, so it cannot identify your jobs.</p>`}
      <${KeyForm} onKey=${() => connect({ anew: true })} sentence=${sentence} />
    </${Card}>`;
  }
  return html`<${OwnJobs} parts=${parts} /><${Usage} me=${parts.me} jobs=${parts.jobs ?? []} />`;
}
