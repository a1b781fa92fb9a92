// The graph of clients: coloured by cluster, at any evaluation of a trial.

import { svg, html, byId, setText, showTip, hideTip, score, plural, inkOn, LETTERS } from "./format.js";

const SIZE = 600;
const LETTERED = 70; // up to this many clients, the circle shows the cluster

export class GraphView {
  constructor(box) {
    this.box = box;
    this.graph = null;
    this.chosen = null;
    box.tabIndex = 0;
    box.setAttribute("role", "img");
    box.addEventListener("keydown", event => this.key(event));
    box.addEventListener("pointermove", event => this.hover(event));
    box.addEventListener("pointerleave", hideTip);
    box.addEventListener("click", event => this.choose(this.under(event)));
  }

  // graph: {nodes, positions, edges, all_edges, clusters, names}
  show(graph) {
    this.graph = graph;
    this.chosen = null;
    this.near = null;
    if (!graph || !graph.nodes) {
      this.box.replaceChildren(html("p", { class: "soft" }, "The graph is not known yet."));
      return;
    }
    this.radius = Math.max(3.2, Math.min(15, 0.3 * SIZE / Math.sqrt(graph.nodes)));
    const half = SIZE / 2 - this.radius - 5;
    this.places = Array.from({ length: graph.nodes }, (_, i) =>
      [SIZE / 2 + half * graph.positions[2 * i] / 1000, SIZE / 2 - half * graph.positions[2 * i + 1] / 1000]);
    let path = "";
    for (let i = 0; i < graph.edges.length; i += 2) path += this.edge(graph.edges[i], graph.edges[i + 1]);
    const dense = graph.edges.length > 12 * graph.nodes || graph.edges.length > 6000;
    this.circles = this.places.map(([cx, cy]) => svg("circle", { class: "client", cx, cy, r: this.radius, "stroke-width": this.radius / 6 + 0.6 }));
    this.letters = graph.nodes <= LETTERED ? this.places.map(([x, y]) =>
      svg("text", { x, y: y + 4.4, "text-anchor": "middle", class: "letters" })) : [];
    this.lines = svg("path", { class: "near" });
    this.rings = svg("g");
    this.box.replaceChildren(svg("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, "aria-hidden": "true" },
      svg("path", { class: dense ? "edges dense" : "edges", d: path }), this.lines, ...this.circles, ...this.letters, this.rings));
  }

  edge(a, b) {
    return `M${this.places[a].map(Math.round).join(" ")}L${this.places[b].map(Math.round).join(" ")}`;
  }

  // frame: {clusters, away, by_client}; before: the clusters of the evaluation before
  paint(frame, before, colours, truth) {
    if (!this.graph?.nodes) return;
    Object.assign(this, { frame, before });
    const away = new Set(frame.away);
    const wrong = truth ? null : misplaced(frame.clusters, this.graph.clusters);
    this.circles.forEach((circle, i) => {
      const letter = truth ? LETTERS[this.graph.clusters[i]] ?? "~" : frame.clusters[i] ?? ".";
      const colour = colours[LETTERS.indexOf(letter)];
      circle.setAttribute("class", `client${away.has(i) ? " away" : ""}${colour ? "" : " unknown"}${wrong?.[i] ? " wrong" : ""}`);
      circle.style.fill = colour ?? "";
      circle.style.stroke = away.has(i) ? colour ?? "" : "";
      if (this.letters.length) {
        setText(this.letters[i], letter === "." ? "" : letter);
        this.letters[i].style.fill = away.has(i) || !colour ? "" : inkOn(colour);
      }
    });
    const rings = this.switched().map(i => svg("circle", { class: "switched", cx: this.places[i][0], cy: this.places[i][1],
      r: this.radius + 3.5, "stroke-width": 2 }));
    if (this.chosen !== null) rings.push(svg("circle", { class: "chosen", cx: this.places[this.chosen][0], cy: this.places[this.chosen][1],
      r: this.radius + 4, "stroke-width": 2.5 }));
    this.rings.replaceChildren(...rings);
    this.lines.setAttribute("d", this.chosen === null ? "" : this.neighbours(this.chosen).map(j => this.edge(this.chosen, j)).join(""));
    this.describe();
    return { wrong: wrong ? wrong.filter(Boolean).length : 0, switched: this.switched().length };
  }

  switched() {
    const { frame, before, graph } = this;
    if (!before || before.length !== frame.clusters.length) return [];
    return [...frame.clusters].flatMap((letter, i) => i < graph.nodes && letter !== before[i] && letter !== "." && before[i] !== "." ? [i] : []);
  }

  describe() {
    const counts = count(this.frame.clusters);
    const parts = Object.entries(counts).map(([letter, number]) => `${letter === "." ? "none" : `cluster ${letter}`}: ${number}`);
    this.box.setAttribute("aria-label", `${plural(this.graph.nodes, "client")}, ${plural(this.graph.all_edges, "link")}; ${parts.join(", ")}. Arrow keys walk from client to client.`);
    const note = this.chosen === null ? "" : this.sentence(this.chosen);
    setText(byId("client"), note || (this.graph.edges.length < 2 * this.graph.all_edges
      ? `${(this.graph.edges.length / 2).toLocaleString("en")} of ${this.graph.all_edges.toLocaleString("en")} links are drawn.` : this.graph.problem));
  }

  name(i) {
    return this.graph.names?.[i] ?? `client ${i}`;
  }

  facts(i) {
    const { frame, graph } = this;
    const letter = frame.clusters[i];
    const rows = [["cluster", letter === undefined || letter === "." ? "none" : letter]];
    if (graph.clusters) rows.push(["true group", String(graph.clusters[i])]);
    if (frame.by_client?.[i] !== undefined && frame.by_client[i] !== null) rows.push([frame.metric.name, score(frame.by_client[i], frame.metric)]);
    rows.push(["neighbours", String(this.neighbours(i).length)]);
    if (frame.away.includes(i)) rows.push(["away", "yes"]);
    if (this.switched().includes(i)) rows.push(["came from", this.before[i]]);
    return rows;
  }

  sentence(i) {
    return `${this.name(i)}: ${this.facts(i).map(([name, value]) => `${name} ${value}`).join(", ")}`;
  }

  neighbours(i) {
    if (this.near?.of !== i) {
      const found = [];
      const { edges } = this.graph;
      for (let e = 0; e < edges.length; e += 2) {
        if (edges[e] === i) found.push(edges[e + 1]);
        else if (edges[e + 1] === i) found.push(edges[e]);
      }
      this.near = { of: i, found };
    }
    return this.near.found;
  }

  under(event) {
    const picture = this.box.querySelector("svg");
    if (!picture || !this.frame) return null;
    const box = picture.getBoundingClientRect();
    const scale = Math.min(box.width, box.height) / SIZE;
    const [x, y] = [(event.clientX - box.left - (box.width - SIZE * scale) / 2) / scale, (event.clientY - box.top - (box.height - SIZE * scale) / 2) / scale];
    let best = null, least = Math.max(this.radius + 4, 12 / scale) ** 2;
    this.places.forEach(([a, b], i) => {
      const distance = (a - x) ** 2 + (b - y) ** 2;
      if (distance < least) [best, least] = [i, distance];
    });
    return best;
  }

  hover(event) {
    const i = this.under(event);
    if (i === null) hideTip();
    else showTip(event.clientX, event.clientY, this.name(i), this.facts(i));
  }

  choose(i) {
    this.chosen = i === this.chosen ? null : i;
    this.onchange?.();
  }

  // An arrow goes to the next client in its direction.
  key(event) {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") this.choose(this.chosen);
    if (!way || !this.places) return;
    event.preventDefault();
    if (this.chosen === null) return this.choose(0);
    const [x, y] = this.places[this.chosen];
    let best = null, least = Infinity;
    this.places.forEach(([a, b], i) => {
      const along = (a - x) * way[0] + (b - y) * way[1];
      const cost = Math.hypot(a - x, b - y) / (along / Math.hypot(a - x, b - y)) ** 2;
      if (i !== this.chosen && along > 0 && cost < least) [best, least] = [i, cost];
    });
    if (best !== null) this.choose(best);
  }
}

// Who is not where most of its true group is: every group gets the cluster with the most agreement, best pairs first.
function misplaced(clusters, truth) {
  if (!truth || truth.length !== clusters.length) return null;
  const pairs = new Map();
  truth.forEach((group, i) => pairs.set(`${group} ${clusters[i]}`, (pairs.get(`${group} ${clusters[i]}`) ?? 0) + 1));
  const found = {}, taken = new Set();
  for (const [pair] of [...pairs].sort((a, b) => b[1] - a[1])) {
    const [group, letter] = pair.split(" ");
    if (!(group in found) && !taken.has(letter) && letter !== ".") {
      found[group] = letter;
      taken.add(letter);
    }
  }
  return truth.map((group, i) => clusters[i] !== "." && clusters[i] !== found[group]);
}

export function count(clusters) {
  const found = {};
  for (const letter of clusters) found[letter] = (found[letter] ?? 0) + 1;
  return Object.fromEntries(Object.entries(found).sort((a, b) => order(a[0]) - order(b[0])));
}

const order = letter => letter === "." ? 99 : letter === "~" ? 98 : LETTERS.indexOf(letter);
