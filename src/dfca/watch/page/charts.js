// Line charts as SVG, drawn to the width that there is. series: [{name, colour, dash, x, y, faint}].

import { svg, showTip, hideTip, amount } from "./format.js";

const LABEL = 15; // pixels between two names at the ends of lines
const LEAST = 12.5; // where there are many; the chart grows with them
const LEADER = 14; // pixels of the thin line from an end to its name
const LETTER = 7.5; // pixels of a letter, on average, in a wide font

export class Chart {
  // options: height, format (of a value), share (0..1: percent axis), close (the axis need not begin at 0), fewer (less is
  // better), names (at the ends), along (of x)
  constructor(box, options) {
    this.box = box;
    this.options = { height: 190, format: amount, names: true, along: "round", ...options };
    this.series = [];
    this.cursor = null;
    new ResizeObserver(() => this.draw()).observe(box);
    box.tabIndex = 0;
    box.setAttribute("role", "img");
    box.addEventListener("pointermove", event => this.point(event));
    box.addEventListener("pointerleave", () => this.leave());
    box.addEventListener("blur", () => this.leave());
    box.addEventListener("keydown", event => this.key(event));
  }

  show(series, options = {}) {
    Object.assign(this.options, options);
    this.series = series.filter(each => each.y.some(value => value !== null));
    const ends = this.series.filter(each => !each.faint).map(each => `${each.name} ${this.options.format(last(each.y))}`);
    this.box.setAttribute("aria-label", `${this.options.title}: ${ends.join(", ") || "nothing yet"}. Arrow keys read values.`);
    this.draw();
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width) return;
    const { names } = this.options;
    const labels = names ? this.series.filter(each => !each.faint).map(each => each.name) : [];
    const height = Math.max(this.options.height, 32 + LEAST * (labels.length - 1));
    const longest = Math.max(0, ...labels.map(name => name.length));
    const right = Math.max(58, Math.min(LEADER + 6 + LETTER * longest, 0.42 * width));
    this.area = { left: 54, right: width - right, top: 8, bottom: height - 24 };
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
    if (this.series.length) {
      this.scale();
      this.axes(picture);
      for (const each of this.series) picture.append(this.line(each));
      if (names) this.names(picture);
      this.mark = svg("line", { class: "cursor", y1: this.area.top, y2: this.area.bottom, visibility: "hidden" });
      picture.append(this.mark);
    } else {
      const empty = svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "soft" });
      empty.textContent = this.options.empty ?? "no evaluation yet";
      picture.append(empty);
    }
    this.box.replaceChildren(picture);
    if (this.cursor !== null) this.tell(this.cursor);
  }

  scale() {
    const xs = this.series.flatMap(each => [each.x[0], each.x[each.x.length - 1]]);
    const ys = this.series.flatMap(each => each.y.filter(value => value !== null));
    let [x0, x1] = [Math.min(...xs, this.options.from ?? Infinity), Math.max(...xs, this.options.until ?? -Infinity)];
    let [low, high] = [lowest(ys), highest(ys)];
    if (this.options.share) {
      const room = Math.max(0.02, 0.08 * (high - low), (0.1 - high + low) / 2);
      [low, high] = [Math.max(0, low - room), Math.min(1, high + room)];
    } else if (this.options.close) {
      const room = 0.08 * (high - low) || 0.1 * Math.abs(high) || 1;
      [low, high] = [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
    } else {
      [low, high] = [Math.min(0, low), high > 0 ? 1.06 * high : 1.06];
    }
    [low, high] = this.options.range ?? [low, high];
    if (x1 <= x0) x1 = x0 + 1;
    const { left, right, top, bottom } = this.area;
    this.x = value => left + (right - left) * (value - x0) / (x1 - x0);
    this.back = pixel => x0 + (x1 - x0) * (pixel - left) / (right - left);
    this.y = value => bottom - (bottom - top) * (value - low) / (high - low || 1);
    this.span = { x0, x1, low, high };
  }

  axes(picture) {
    const { left, right, bottom } = this.area;
    const { x0, x1, low, high } = this.span;
    for (const value of ticks(low, high, this.options.height > 150 ? 5 : 3, this.options.whole ? 1 : 0)) {
      picture.append(svg("line", { class: "axis", x1: left, x2: right, y1: this.y(value), y2: this.y(value) }));
      picture.append(words(left - 6, this.y(value) + 4, this.tick(value), "end"));
    }
    const wanted = Math.max(2, Math.floor((right - left) / 75));
    for (const value of ticks(x0, x1, wanted)) picture.append(words(this.x(value), bottom + 17, amount(value), "middle"));
    picture.append(words(right + 14, bottom + 17, this.options.along, "start"));
  }

  tick(value) {
    if (this.options.share) return `${Math.round(100 * value * 10) / 10} %`;
    return this.options.close ? (Math.abs(value) < 1e6 ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : value.toExponential(1)) : this.options.format(value);
  }

  line({ x, y, colour, dash, faint }) {
    let path = "", pen = "M";
    y.forEach((value, at) => {
      if (value === null) pen = "M";
      else { path += `${pen}${this.x(x[at]).toFixed(1)} ${this.y(value).toFixed(1)}`; pen = "L"; }
    });
    const single = y.filter(value => value !== null).length === 1;
    return svg("path", { class: `series${faint ? " faint" : ""}${single ? " single" : ""}`, d: single ? `${path}h.01` : path, stroke: colour,
      "stroke-dasharray": dash && !single ? dash : null });
  }

  // Names stand at the ends of their lines, pushed apart where they would overlap; a thin line leads to each.
  names(picture) {
    const { right, top, bottom } = this.area;
    const ends = this.series.filter(each => !each.faint)
      .map(each => ({ name: each.name, colour: each.colour, at: this.y(last(each.y)), y: this.y(last(each.y)) }))
      .sort((a, b) => a.y - b.y);
    const gap = Math.min(LABEL, (bottom - top) / Math.max(1, ends.length - 1));
    moveApart(ends.map(end => end.at), gap).forEach((y, i) => { ends[i].y = Math.max(y, i ? ends[i - 1].y + gap : top); });
    for (let i = ends.length - 1, floor = bottom; i >= 0; i--, floor -= gap) ends[i].y = Math.min(ends[i].y, floor);
    const most = Math.floor((this.box.clientWidth - right - LEADER - 4) / LETTER);
    for (const end of ends) {
      picture.append(svg("line", { class: "leader", x1: right + 1, y1: end.at, x2: right + LEADER - 2, y2: end.y, stroke: end.colour }));
      const text = words(right + LEADER + 2, end.y + 4, end.name.length > most ? `${end.name.slice(0, most - 1)}…` : end.name, "start");
      text.setAttribute("class", "name");
      text.style.fill = `color-mix(in srgb, ${end.colour} 70%, var(--text))`;
      picture.append(text);
    }
  }

  point(event) {
    if (!this.series.length) return;
    const box = this.box.getBoundingClientRect();
    this.cursor = this.back(event.clientX - box.left);
    this.tell(this.cursor, event.clientX, event.clientY);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (!step || !this.series.length) return;
    event.preventDefault();
    const xs = [...new Set(this.series.flatMap(each => each.x))].sort((a, b) => a - b);
    const at = this.cursor === null ? (step > 0 ? -1 : xs.length) : nearest(xs, this.cursor);
    this.cursor = xs[Math.max(0, Math.min(xs.length - 1, at + step))];
    this.tell(this.cursor);
  }

  tell(where, x, y) {
    const rows = this.series.filter(each => !each.faint).map(each => {
      const at = nearest(each.x, where);
      return { name: each.name, colour: each.colour, x: each.x[at], value: each.y[at] };
    }).filter(row => row.value !== null && row.value !== undefined);
    if (!rows.length) return;
    const near = rows.reduce((a, b) => Math.abs(b.x - where) < Math.abs(a.x - where) ? b : a).x;
    const shown = rows.filter(row => Math.abs(row.x - near) <= 0.02 * (this.span.x1 - this.span.x0)).sort((a, b) => this.options.fewer ? a.value - b.value : b.value - a.value);
    this.mark.setAttribute("x1", this.x(near));
    this.mark.setAttribute("x2", this.x(near));
    this.mark.setAttribute("visibility", "visible");
    const box = this.box.getBoundingClientRect();
    showTip(x ?? box.left + this.x(near), y ?? box.top + 20, `${this.options.along} ${amount(near)}`,
      shown.map(row => [row.name, this.options.format(row.value), row.colour]));
  }

  leave() {
    this.cursor = null;
    this.mark?.setAttribute("visibility", "hidden");
    hideTip();
  }
}

// A picture without axes, for small multiples: all share x from 0 to `until` and the range of y.
export function miniature(series, until, [low, high], width = 176, height = 84) {
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, preserveAspectRatio: "none", "aria-hidden": "true" });
  const [x, y] = [v => 2 + (width - 4) * v / (until || 1), v => height - 3 - (height - 6) * (v - low) / (high - low || 1)];
  for (const share of [low, high]) picture.append(svg("line", { class: "axis", x1: 0, x2: width, y1: y(share), y2: y(share) }));
  for (const each of series) {
    const points = each.x.map((value, at) => each.y[at] === null ? "" : `${x(value).toFixed(1)},${y(each.y[at]).toFixed(1)}`);
    picture.append(svg("polyline", { class: "series", points: points.join(" "), stroke: each.colour,
      "stroke-dasharray": each.dash || null, "vector-effect": "non-scaling-stroke" }));
  }
  return picture;
}

// The mean of the finished curves or, where none is, of those that are at least half as far as the furthest: a seed that
// begins must not cut the mean of the others short. It reaches as far as all of them; between points a curve is straight.
export function meanCurve(curves) {
  const begun = curves.filter(curve => curve.x.length), reach = curve => curve.x[curve.x.length - 1];
  const finished = begun.filter(curve => curve.finished), furthest = Math.max(...begun.map(reach));
  const known = finished.length ? finished : begun.filter(curve => reach(curve) >= 0.5 * furthest);
  if (known.length < 2) return known[0] ?? { x: [], y: [] };
  const [begin, end] = [Math.max(...known.map(each => each.x[0])), Math.min(...known.map(each => each.x[each.x.length - 1]))];
  const x = [...new Set(known.flatMap(each => each.x))].filter(value => value >= begin && value <= end).sort((a, b) => a - b);
  const y = x.map(value => {
    const found = known.map(each => at(each, value)).filter(each => each !== null);
    return found.length === known.length ? found.reduce((a, b) => a + b) / found.length : null;
  });
  return { x, y };
}

function at({ x, y }, value) {
  let after = x.findIndex(each => each >= value);
  if (after < 0) after = x.length - 1;
  if (x[after] === value || after === 0) return y[after];
  if (y[after] === null || y[after - 1] === null) return null;
  return y[after - 1] + (y[after] - y[after - 1]) * (value - x[after - 1]) / (x[after] - x[after - 1]);
}

// Move ascending places apart to at least `gap`, as little as possible: those in conflict keep their middle.
function moveApart(places, gap) {
  const groups = [];
  for (const place of places) {
    groups.push([place, 1]);
    while (groups.length > 1) {
      const [[below, m], [above, n]] = groups.slice(-2);
      if (above - below >= gap * (m + n) / 2) break;
      groups.splice(-2, 2, [(below * m + above * n) / (m + n), m + n]);
    }
  }
  return groups.flatMap(([middle, n]) => Array.from({ length: n }, (_, i) => middle + gap * (i - (n - 1) / 2)));
}

function words(x, y, content, anchor) {
  const text = svg("text", { x, y, "text-anchor": anchor, class: "soft" });
  text.textContent = content;
  return text;
}

function ticks(low, high, wanted, least = 0) {
  const rough = Math.max(least, (high - low) / wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function nearest(sorted, value) {
  let best = 0;
  for (let i = 1; i < sorted.length; i++) if (Math.abs(sorted[i] - value) < Math.abs(sorted[best] - value)) best = i;
  return best;
}

const lowest = values => values.reduce((a, b) => Math.min(a, b), Infinity);
const highest = values => values.reduce((a, b) => Math.max(a, b), -Infinity);
export function last(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return null;
}
