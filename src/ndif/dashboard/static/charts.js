// Throughput and latency over the last hours.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { clock, count, duration, plural } from "./format.js";
import { now } from "./live.js";
import { Card, Empty } from "./parts.js";

const HEIGHT = 190;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Render again when the colours change. */
function useTheme() {
  const [version, change] = useState(0);
  useEffect(() => {
    const next = () => change((before) => before + 1);
    const preferred = matchMedia("(prefers-color-scheme: dark)");
    preferred.addEventListener("change", next);
    addEventListener("ndif-theme", next);
    return () => {
      preferred.removeEventListener("change", next);
      removeEventListener("ndif-theme", next);
    };
  }, []);
  return version;
}

function Chart({ data, series, format, summary }) {
  const place = useRef(null);
  const plot = useRef(null);
  const theme = useTheme();
  useEffect(() => {
    const axis = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    const width = () => Math.max(200, place.current.clientWidth);
    plot.current = new uPlot(
      {
        width: width(),
        height: HEIGHT,
        padding: [12, 8, 0, 0],
        cursor: { drag: { x: false, y: false }, points: { size: 6 } },
        scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, Number.EPSILON + (format ? 0.1 : 4))] } },
        series: [
          { value: (_, moment) => (moment === null ? "–" : clock(moment)), label: "Time" },
          ...series.map((each) => ({
            label: each.label,
            stroke: colour(each.colour),
            width: 2,
            fill: each.bars ? colour(each.colour) : undefined,
            paths: each.bars ? uPlot.paths.bars({ size: [0.7, 24], radius: 0.15 }) : uPlot.paths.linear(),
            points: { show: !each.bars, size: 5, fill: colour(each.colour), filter: alone },
            dash: each.dash,
            spanGaps: false,
            value: (_, value) => (value === null || value === undefined ? "–" : (format ?? count)(value)),
          })),
        ],
        axes: [
          { ...axis, values: (_, marks) => marks.map(clock), space: 60, size: 30 },
          {
            ...axis,
            size: format ? 58 : 40,
            space: 36,
            incrs: format ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000],
            values: (_, marks) => marks.map((mark) => (format ?? count)(mark)),
          },
        ],
      },
      data,
      place.current,
    );
    const resized = new ResizeObserver(() => plot.current.setSize({ width: width(), height: HEIGHT }));
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      plot.current.destroy();
    };
  }, [theme]);
  useEffect(() => plot.current.setData(data), [data]);
  return html`<figure>
    <div class="plot" ref=${place} aria-hidden="true"></div>
    <figcaption class="note">${summary}</figcaption>
  </figure>`;
}

/** Points without a neighbour, which no line would show. */
function alone(plot, series) {
  const values = plot.data[series];
  const found = [];
  values.forEach((value, index) => {
    if (value !== null && (values[index - 1] ?? null) === null && (values[index + 1] ?? null) === null) found.push(index);
  });
  return found;
}

function columns(history) {
  const byStart = new Map(history.intervals.map((each) => [each.start, each]));
  const last = Math.max(now(), ...byStart.keys());
  const starts = [];
  for (let start = history.since; start <= last; start += history.step_s) starts.push(start);
  const found = starts.map((start) => byStart.get(start));
  return {
    throughput: [starts, found.map((each) => each?.jobs ?? 0), found.map((each) => each?.errors ?? 0)],
    latency: [
      starts,
      found.map((each) => each?.total_s?.[0] ?? null),
      found.map((each) => each?.total_s?.[1] ?? null),
      found.map((each) => each?.wait_s?.[0] ?? null),
    ],
  };
}

const THROUGHPUT = [
  { label: "Jobs", colour: "--accent", bars: true },
  { label: "Errors", colour: "--bad", bars: true },
];
const LATENCY = [
  { label: "Median", colour: "--accent" },
  { label: "95 %", colour: "--warm", dash: [5, 3] },
  { label: "Median wait", colour: "--cold", dash: [2, 3] },
];

export function Charts({ history }) {
  const data = useMemo(() => columns(history), [history]);
  const jobs = history.intervals.reduce((total, each) => total + each.jobs, 0);
  const errors = history.intervals.reduce((total, each) => total + each.errors, 0);
  const last = history.intervals.filter((each) => each.total_s).at(-1);
  const minutes = history.step_s / 60;
  if (jobs === 0) {
    return html`<${Card} title="The last six hours" id="history">
      <${Empty}>No job has ended in this time. Throughput and latency appear here once jobs have ended.</${Empty}>
    </${Card}>`;
  }
  return html`
    <${Card} title="Throughput" id="throughput" note=${`jobs in ${minutes} minutes`}>
      <${Chart} data=${data.throughput} series=${THROUGHPUT}
        summary=${`${plural(jobs, "job")} ended in six hours, ${plural(errors, "error")}.`} />
    </${Card}>
    <${Card} title="Latency" id="latency" note="from arrival to end">
      <${Chart} data=${data.latency} series=${LATENCY} format=${duration}
        summary=${`Latest interval: half of the jobs within ${duration(last.total_s[0])}, 95 % within ${duration(last.total_s[1])}.`} />
    </${Card}>`;
}
