// The calendar of the next seven days.

import { html } from "./vendor/preact.js";
import { clock, day, dayAndTime, plural } from "./format.js";
import { Card, Empty, useNow } from "./parts.js";

const DAY_S = 86400;
const DAYS = 7;
const LABELLED = 12; // minimum width, in percent, of a window that shows its times

/** The starts of the shown days, beginning with today; a day may have 23 or 25 hours. */
function days(moment) {
  const first = new Date(moment * 1000);
  first.setHours(0, 0, 0, 0);
  return Array.from({ length: DAYS + 1 }, (_, index) => {
    const start = new Date(first);
    start.setDate(start.getDate() + index);
    return start.getTime() / 1000;
  });
}

function endOf(window) {
  return window.end - window.start < DAY_S ? clock(window.end) : dayAndTime(window.end);
}

export function Schedule({ windows }) {
  const moment = useNow(60000);
  const starts = days(moment);
  const [first, last] = [starts[0], starts[DAYS]];
  const place = (at) => (100 * (Math.min(Math.max(at, first), last) - first)) / (last - first);
  const models = [...new Set(windows.map((each) => each.model))].sort();
  return html`<${Card} title="Schedule" id="schedule" note=${windows.length ? "the next seven days, in your time zone" : ""}>
    ${windows.length === 0
      ? html`<${Empty}>No model is booked in the next seven days.</${Empty}>`
      : html`
        <div class="calendar" aria-hidden="true">
          <div class="days">${starts.slice(0, DAYS).map((start) => html`<span key=${start}>${day(start)}</span>`)}</div>
          ${models.map((model) => html`<div class="lane" key=${model}>
            <div class="lane-name">${model}</div>
            <div class="lane-track">
              ${windows.filter((each) => each.model === model && each.start < last && each.end > first).map(
                (each) => html`<span class=${`window${each.start <= moment && moment < each.end ? " open" : ""}`}
                  key=${each.start} title=${`${each.title}: ${dayAndTime(each.start)} to ${endOf(each)}`}
                  style=${{ left: `${place(each.start)}%`, width: `${place(each.end) - place(each.start)}%` }}
                  >${place(each.end) - place(each.start) > LABELLED && `${clock(each.start)}–${endOf(each)}`}</span>`,
              )}
              <span class="present" style=${{ left: `${place(moment)}%` }}></span>
            </div>
          </div>`)}
        </div>
        <details class="windows"><summary>${plural(windows.length, "window")} as a list</summary>
          <ul>${windows.map((each) => html`<li key=${each.model + each.start}>
            <span class="name">${each.model}</span>
            ${each.start <= moment && moment < each.end && html` <span class="state good">now</span>`}
            <span class="note">${dayAndTime(each.start)} to ${endOf(each)}${each.title && each.title !== each.model
              ? ` · ${each.title}`
              : ""}</span>
          </li>`)}</ul>
        </details>`}
  </${Card}>`;
}
