// The record for an operator: events, usage, alerts, call-backs and the calendar.

import { html, useState } from "../vendor/preact.js";
import { bytes, count, duration } from "../format.js";
import { Card } from "../parts.js";
import { Table, Told, time, useActions, useQuestion, useReading } from "./acting.js";

function Problem({ reading }) {
  return reading.problem && html`<p class="problem" role="alert">${reading.problem}</p>`;
}

/** The log of events: what was done, by whom and when. */
export function Events() {
  const events = useReading("GET", "/admin/events");
  const [kind, setKind] = useState("");
  const all = events.answer?.events ?? [];
  const kinds = [...new Set(all.map((each) => each.kind))].toSorted();
  const shown = all.filter((each) => !kind || each.kind === kind);
  return html`<${Card} title="Events" id="events">
    <${Problem} reading=${events} />
    <p><label for="event-kind">Kind </label>
      <select id="event-kind" value=${kind} onChange=${(event) => setKind(event.currentTarget.value)}>
        <option value="">all</option>${kinds.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
      </select></p>
    <${Table} caption="The last events, the newest first" headings=${["Time", "Event", "Subject", "By", "Details"]}
      empty=${events.answer ? "Nothing has happened yet." : "Loading…"}
      rows=${shown.map((each, place) => ({
        key: `${all.length - place} ${each.at} ${each.kind}`,
        cells: [time(each.at), each.count > 1 ? `${each.kind} (${each.count} times)` : each.kind, each.subject, each.by, each.text],
      }))} />
  </${Card}>`;
}

/** The cost of jobs, by user, model or day. */
export function Usage() {
  const [by, setBy] = useState("user");
  const [since, setSince] = useState("");
  const usage = useReading("POST", "/admin/usage", { by, since: since || null, user: null });
  return html`<${Card} title="Usage" id="usage">
    <${Problem} reading=${usage} />
    <p class="buttons">
      <label for="usage-by">By</label>
      <select id="usage-by" value=${by} onChange=${(event) => setBy(event.currentTarget.value)}>
        <option value="user">user</option><option value="model">model</option><option value="day">day</option>
      </select>
      <label for="usage-since">Since</label>
      <input id="usage-since" type="date" value=${since} onChange=${(event) => setSince(event.currentTarget.value)} />
    </p>
    <${Table} caption=${`Jobs that have ended, by ${by}`} headings=${[by, "Jobs", "Errors", "Execution", "Results"]}
      empty=${usage.answer ? "No job has ended." : "Loading…"}
      rows=${(usage.answer?.usage ?? []).map((each) => ({
        key: each.name,
        cells: [each.name || "–", count(each.jobs), count(each.errors), duration(each.execution_s), bytes(each.result_bytes)],
      }))} />
  </${Card}>`;
}

/** Alerts that are open, and those of the last day. */
export function Alerts() {
  const alerts = useReading("GET", "/admin/alerts");
  const rows = (incidents) => incidents.flatMap((incident) => incident.causes.map((cause) => ({
    key: `${incident.id} ${cause.kind} ${cause.subject}`,
    cells: [cause.sentence, incident.severity, time(cause.since), cause.over === null ? "holds" : time(cause.over)],
  })));
  const headings = ["Cause", "Severity", "Since", "Over"];
  return html`<${Card} title="Alerts" id="alerts">
    <${Problem} reading=${alerts} />
    ${alerts.answer && html`
      <${Table} caption="Open alerts" headings=${headings} rows=${rows(alerts.answer.open)} empty="No alert is open." />
      <${Table} caption="Resolved in the last day" headings=${headings} rows=${rows(alerts.answer.resolved)} empty="None was resolved in the last day." />`}
  </${Card}>`;
}

/** Call-backs that wait, and those that were given up. */
export function Callbacks() {
  const callbacks = useReading("GET", "/admin/callbacks");
  const actions = useActions(callbacks.read);
  const [confirm, dialog] = useQuestion();
  const found = callbacks.answer;
  async function retry(body, title) {
    if (await confirm(title, "Receivers may get again what they got before.", "Make again"))
      await actions.act("/admin/callbacks/retry", body, "They are made again.");
  }
  return html`<${Card} title="Call-backs" id="callbacks">
    <${Problem} reading=${callbacks} />
    <${Told} told=${actions.told} />
    ${found && html`<p>${found.given_up} were given up, ${found.waiting} wait.</p>`}
    <${Table} caption="Call-backs" headings=${["Job", "To", "State", "Attempts", "Next", "Problem", "Change"]}
      empty=${found ? "No call-back waits or was given up." : "Loading…"}
      rows=${(found?.callbacks ?? []).map((each) => ({
        key: `${each.request_id} ${each.status}`,
        cells: [
          html`<code>${each.request_id.slice(0, 8)}</code>`,
          each.to,
          each.state,
          each.attempts,
          time(each.due),
          each.problem ?? "–",
          html`<button disabled=${actions.busy} aria-label=${`Make the call-back of ${each.request_id} again`}
            onClick=${() => retry({ request_id: each.request_id }, `Make the call-back of ${each.request_id} again?`)}>Make again</button>`,
        ],
      }))} />
    ${found?.given_up > 0 && html`<p><button disabled=${actions.busy}
      onClick=${() => retry({ all: true }, "Make every call-back again that was given up?")}>Make all again…</button></p>`}
    ${dialog}
  </${Card}>`;
}

/** The calendar as the server has read it. */
export function Calendar() {
  const status = useReading("GET", "/admin/status");
  const schedule = status.answer?.schedule;
  return html`<${Card} title="Calendar" id="calendar">
    <${Problem} reading=${status} />
    ${schedule && html`<p>${schedule.source
      ? html`Read from <code>${schedule.source}</code>, where bookings are made and changed.`
      : html`This server follows no calendar: the variable <code>NDIF_SCHEDULE</code> names one.`}
      ${schedule.next_change && ` The next change is at ${time(Date.parse(schedule.next_change) / 1000)}.`}</p>
      ${schedule.problems.length > 0 && html`<ul class="problem">${schedule.problems.map((each) => html`<li>${each}</li>`)}</ul>`}
      <${Table} caption="Models that are booked now" headings=${["Model", "From", "Until"]} empty="No model is booked now."
        rows=${schedule.windows.map((each) => ({
          key: `${each.model} ${each.start}`,
          cells: [each.model, time(Date.parse(each.start) / 1000), time(Date.parse(each.end) / 1000)],
        }))} />`}
  </${Card}>`;
}
