// Records for the operator: events, usage, alerts, webhooks and mails, and the calendar.

import { html, useState } from "../vendor/preact.js";
import { bytes, count, duration } from "../format.js";
import { Card } from "../parts.js";
import { Table, Told, time, useActions, useQuestion, useReading } from "./acting.js";

function Problem({ reading }) {
  return reading.problem && html`<p class="problem" role="alert">${reading.problem}</p>`;
}

/** The log of events: actions with their authors and times. */
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
    <${Table} caption="The last events, newest first" headings=${["Time", "Event", "Subject", "By", "Details"]}
      empty=${events.answer ? "No event was recorded yet." : "Loading…"}
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
    <${Table} caption=${`Ended jobs, by ${by}`} headings=${[by, "Jobs", "Errors", "Execution", "Results"]}
      empty=${usage.answer ? "No job has ended." : "Loading…"}
      rows=${(usage.answer?.usage ?? []).map((each) => ({
        key: each.name,
        cells: [each.name || "–", count(each.jobs), count(each.errors), duration(each.execution_s), bytes(each.result_bytes)],
      }))} />
  </${Card}>`;
}

/** Open alerts, and alerts that were resolved in the last day. */
export function Alerts() {
  const alerts = useReading("GET", "/admin/alerts");
  const rows = (incidents) => incidents.flatMap((incident) => incident.causes.map((cause) => ({
    key: `${incident.id} ${cause.kind} ${cause.subject}`,
    cells: [cause.sentence, incident.severity, time(cause.since), cause.over === null ? "persists" : time(cause.over)],
  })));
  const headings = ["Cause", "Severity", "Since", "Over"];
  return html`<${Card} title="Alerts" id="alerts">
    <${Problem} reading=${alerts} />
    ${alerts.answer && html`
      <${Table} caption="Open alerts" headings=${headings} rows=${rows(alerts.answer.open)} empty="No alert is open." />
      <${Table} caption="Resolved in the last day" headings=${headings} rows=${rows(alerts.answer.resolved)} empty="No alert was resolved in the last day." />`}
  </${Card}>`;
}

/** Webhooks and mails that wait or were given up. */
export function Callbacks() {
  const callbacks = useReading("GET", "/admin/callbacks");
  const actions = useActions(callbacks.read);
  const [confirm, dialog] = useQuestion();
  const found = callbacks.answer;
  async function retry(body, title) {
    if (await confirm(title, "Recipients may get the same message again.", "Send again"))
      await actions.act("/admin/callbacks/retry", body, "They are sent again.");
  }
  return html`<${Card} title="Webhooks and mail" id="callbacks">
    <${Problem} reading=${callbacks} />
    <${Told} told=${actions.told} />
    ${found && html`<p>${found.given_up} given up, ${found.waiting} waiting.</p>`}
    <${Table} caption="Webhooks and mails" headings=${["Job", "To", "State", "Attempts", "Next", "Problem", "Change"]}
      empty=${found ? "No webhook or mail waits or was given up." : "Loading…"}
      rows=${(found?.callbacks ?? []).map((each) => ({
        key: `${each.request_id} ${each.status}`,
        cells: [
          html`<code>${each.request_id.slice(0, 8)}</code>`,
          each.to,
          each.state,
          each.attempts,
          time(each.due),
          each.problem ?? "–",
          html`<button disabled=${actions.busy} aria-label=${`Send the message of ${each.request_id} again`}
            onClick=${() => retry({ request_id: each.request_id }, `Send the message of ${each.request_id} again?`)}>Send again</button>`,
        ],
      }))} />
    ${found?.given_up > 0 && html`<p><button disabled=${actions.busy}
      onClick=${() => retry({ all: true }, "Send all given-up webhooks and mails again?")}>Send all again…</button></p>`}
    ${dialog}
  </${Card}>`;
}

/** The calendar, as the server read it. */
export function Calendar() {
  const status = useReading("GET", "/admin/status");
  const schedule = status.answer?.schedule;
  return html`<${Card} title="Calendar" id="calendar">
    <${Problem} reading=${status} />
    ${schedule && html`<p>${schedule.source
      ? html`The calendar is <code>${schedule.source}</code>. Make and change bookings there.`
      : html`This server follows no calendar. Set <code>NDIF_SCHEDULE</code> to use one.`}
      ${schedule.next_change && ` The next change is at ${time(Date.parse(schedule.next_change) / 1000)}.`}</p>
      ${schedule.problems.length > 0 && html`<ul class="problem">${schedule.problems.map((each) => html`<li>${each}</li>`)}</ul>`}
      <${Table} caption="Booked models" headings=${["Model", "From", "Until"]} empty="No model is booked."
        rows=${schedule.windows.map((each) => ({
          key: `${each.model} ${each.start}`,
          cells: [each.model, time(Date.parse(each.start) / 1000), time(Date.parse(each.end) / 1000)],
        }))} />`}
  </${Card}>`;
}
