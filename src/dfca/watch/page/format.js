// Numbers and elements. Texts are only ever set as text: whatever a run folder holds cannot become markup.

export const LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
const SVG = "http://www.w3.org/2000/svg";

export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

export const byId = id => document.getElementById(id);

// Changes a text only if it is another one: screen readers announce every change.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const percent = value => value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`;

// A score as its metric is read: percent with one decimal, else three digits that matter, and its unit.
export function score(value, metric) {
  if (!metric || metric.percent) return percent(value);
  return value === null || value === undefined ? "–" : `${significant(value)}${metric.unit ? ` ${metric.unit}` : ""}`;
}

export function significant(value, digits = 3) {
  const size = Math.abs(value);
  if (size && (size < 1e-6 || size >= 1e9)) return value.toExponential(digits - 1);
  const decimals = size ? Math.max(0, Math.min(8, digits - 1 - Math.floor(Math.log10(size)))) : 0;
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (value < 1000 || unit === "TB") return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1000;
  }
}

export function amount(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(size >= 10 ? 1 : 2);
}

export const plural = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

export function ago(seconds) {
  if (seconds < 1.5) return "just now";
  if (seconds < 100) return `${Math.round(seconds)} s ago`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}

// Black or white, whichever can be read on a colour.
export function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16) / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#111" : "#fff";
}

// A box that follows the pointer, or stands beside what has the focus. rows: [name, value, colour].
export function showTip(x, y, head, rows) {
  const tip = byId("tip");
  tip.replaceChildren(html("b", {}, head), ...rows.map(([name, value, colour]) => {
    const left = html("span", {}, name);
    if (colour) {
      const swatch = html("span", { class: "swatch" });
      swatch.style.background = colour;
      left.prepend(swatch);
    }
    return html("div", {}, left, html("span", {}, value));
  }));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${Math.max(4, y + 14 + box.height > innerHeight ? y - box.height - 10 : y + 14)}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}
