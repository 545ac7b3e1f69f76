// Formats of numbers, times and sizes for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let power = 0;
  let left = count;
  while (left >= 1000 && power < UNITS.length - 1) {
    left /= 1024;
    power += 1;
  }
  return `${power && left < 10 ? left.toFixed(1) : Math.round(left)} ${UNITS[power]}`;
}

export function count(number) {
  if (number === null || number === undefined) return "–";
  return number.toLocaleString("en");
}

export function parameters(number) {
  if (!number) return "";
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (number >= size) {
      const scaled = number / size;
      return `${scaled < 10 ? scaled.toFixed(1) : Math.round(scaled)} ${letter} parameters`;
    }
  }
  return `${number} parameters`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0005) return "0 s";
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 ? `${days} d ${hours % 24} h` : `${days} d`;
}

export function ago(moment, now) {
  if (moment === null || moment === undefined) return "–";
  const seconds = Math.max(0, now - moment);
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
}

function two(number) {
  return String(number).padStart(2, "0");
}

/** The time of a day, as 22:43. */
export function clock(moment) {
  const at = new Date(moment * 1000);
  return `${two(at.getHours())}:${two(at.getMinutes())}`;
}

/** A day, as Thu 2026-11-26. */
export function day(moment) {
  const at = new Date(moment * 1000);
  const name = at.toLocaleDateString("en", { weekday: "short" });
  return `${name} ${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

/** A moment, as Thu 2026-11-26 22:43. */
export function dayAndTime(moment) {
  return `${day(moment)} ${clock(moment)}`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
