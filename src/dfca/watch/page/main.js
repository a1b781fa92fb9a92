// The page: takes in what the server sends, keeps what is chosen, and draws what has changed.

import { html, byId, setText, percent, score, bytes, amount, plural, ago, LETTERS, svg } from "./format.js";
import { Chart, miniature, meanCurve, last } from "./charts.js";
import { GraphView, count } from "./graph.js";

const MEASURES = [
  ["cluster_accuracy", "Clients in their true cluster", { share: true, format: percent }],
  ["live_clusters", "Clusters in use", { whole: true }],
  ["switches", "Clients that switched", { whole: true }],
  ["traffic", "Sent and received so far, per client", { format: bytes }],
  ["staleness", "Mean age of folded models (staleness)", {}],
  ["away", "Clients away", { whole: true }],
];
const page = { run: {}, points: [], alarms: [], problems: [], algorithms: [], trials: {}, nodes: null, colours: null };
const chosen = { point: null, algorithm: null, seed: null, follow: true, frame: null };
const details = { key: null, generation: -1, frames: [], log: [], by_client: [], graph: null };
const graph = new GraphView(byId("graph"));
const scores = new Chart(byId("score"), { height: 270 });
const byCluster = new Chart(byId("by-cluster"), { height: 190 });
const measures = new Map();
window.dfca = { page, chosen, details }; // for tests

// --- what comes

const stream = new EventSource("events");
let connected = false;
stream.onmessage = event => {
  connected = true;
  const news = JSON.parse(event.data);
  const trials = news.all ? news.trials ?? {} : { ...page.trials, ...news.trials };
  Object.assign(page, news, { trials });
  page.newest = newest(news.trials ?? {}) ?? page.newest;
  refresh();
};
stream.onerror = () => { connected = false; showState(); };
setInterval(showState, 1000);

// The trial that moved last: among those that came now, one that runs, with the most evaluations behind it.
function newest(trials) {
  const moved = Object.entries(trials).filter(([, trial]) => trial.x.length);
  const running = moved.filter(([, trial]) => trial.state === "running");
  return (running.length ? running[running.length - 1] : Object.keys(page.trials).length === moved.length ? moved[0] : moved[moved.length - 1])?.[0] ?? null;
}

function refresh() {
  byId("main").hidden = false;
  choose();
  showState();
  showMessages();
  showPoints();
  showChoice();
  showCurves();
  showTrials();
  showNodes();
  follow();
}

// --- what is chosen

const inPoint = trial => !chosen.point || trial.digest === chosen.point;
const trials = () => Object.values(page.trials).filter(inPoint);
const keyOf = trial => `${trial.algorithm}/${trial.seed}/${trial.digest}`;
const current = () => page.trials[`${chosen.algorithm}/${chosen.seed}/${chosen.point ?? ""}`];

function choose() {
  const ahead = page.trials[page.newest];
  if (chosen.follow && ahead) Object.assign(chosen, { point: page.points.length ? ahead.digest : null, algorithm: ahead.algorithm, seed: ahead.seed });
  if (page.points.length && !page.points.some(point => point.digest === chosen.point)) chosen.point = page.points[0].digest;
  if (!current()) {
    const first = trials().find(trial => trial.algorithm === chosen.algorithm) ?? trials()[0];
    if (first) Object.assign(chosen, { algorithm: first.algorithm, seed: first.seed });
  }
}

function pick(change) {
  Object.assign(chosen, change, { follow: false, frame: null });
  refresh();
}

byId("algorithm").addEventListener("change", event => pick({ algorithm: event.target.value }));
byId("seed").addEventListener("change", event => pick({ seed: Number(event.target.value) }));
byId("follow").addEventListener("change", event => { chosen.follow = event.target.checked; chosen.frame = null; refresh(); });
byId("colouring").addEventListener("change", () => paint());
byId("choice").addEventListener("submit", event => event.preventDefault());
byId("slider").addEventListener("input", event => { chosen.frame = Number(event.target.value); settle(); });
byId("back").addEventListener("click", () => { chosen.frame = Math.max(0, shownFrame() - 1); settle(); });
byId("forth").addEventListener("click", () => { chosen.frame = shownFrame() + 1; settle(); });
byId("live").addEventListener("click", () => { chosen.frame = null; paint(); });
graph.onchange = () => paint();

function settle() {
  if (chosen.frame >= details.frames.length - 1) chosen.frame = null;
  paint();
}

function options(select, values, value) {
  const wanted = values.map(String);
  if ([...select.options].map(option => option.value).join("\n") !== wanted.join("\n")) {
    select.replaceChildren(...wanted.map(each => html("option", { value: each }, each)));
  }
  if (select.value !== String(value)) select.value = String(value);
}

function showChoice() {
  const ours = trials();
  options(byId("algorithm"), [...new Set(ours.map(trial => trial.algorithm))], chosen.algorithm);
  options(byId("seed"), [...new Set(ours.filter(trial => trial.algorithm === chosen.algorithm).map(trial => trial.seed))], chosen.seed);
  byId("follow").checked = chosen.follow;
  byId("choice").hidden = page.run.kind === "nodes";
}

// --- the head

function showState() {
  const { run } = page;
  if (!run.title) return;
  const words = { running: "running", finished: "finished", stopped: "not running" };
  const parts = [connected ? words[run.state] ?? "" : "no connection: dfca watch has ended, or is busy"];
  if (run.kind === "nodes") parts.push(`${run.running} of ${plural(run.asked, "node")} answer`);
  else {
    if (run.asked > 1 || run.state === "finished") parts.push(`${run.finished} of ${plural(run.asked, "trial")} finished${run.failed ? `, ${run.failed} failed` : ""}`);
    const trial = current();
    if (trial?.state === "running" && trial.x.length) parts.push(`${trial.algorithm}, seed ${trial.seed}: ${progress(trial)}`);
    if (run.clients) parts.push(plural(run.clients, "client"));
    if (run.changed_at) parts.push(`last evaluation ${ago(Date.now() / 1000 - run.changed_at)}`);
    if (run.state === "stopped") parts.push("the same dfca run command continues it");
  }
  setText(byId("state"), parts.filter(Boolean).join(" · "));
  byId("dot").className = `dot ${connected ? run.state : "gone"}`;
  setText(byId("title"), run.title);
  setText(byId("about"), (run.description ?? "").replaceAll("`", ""));
  document.title = `${run.asked > 1 ? `${run.finished ?? run.running}/${run.asked} ` : ""}${run.title}`;
  byId("progress").hidden = run.kind === "nodes" || run.asked < 2;
  byId("progress").value = run.asked ? share() : 0;
  setText(byId("footer"), `${run.folder} · dfca ${page.version ?? ""} · this page only reads, and asks nobody but this machine`);
}

function progress(trial) {
  const { rounds, until_s } = page.run;
  const x = last(trial.x);
  if (trial.timed) return `${amount(x)}${until_s ? ` of ${amount(until_s)}` : ""} ${page.run.virtual ? "virtual " : ""}s`;
  return `round ${x}${rounds ? ` of ${rounds}` : ""}`;
}

function share() {
  const { rounds, until_s } = page.run;
  const done = Object.values(page.trials).map(trial => trial.state === "finished" || trial.state === "failed" ? 1
    : Math.min(1, (last(trial.x) ?? 0) / ((trial.timed ? until_s : rounds) || Infinity)));
  return done.reduce((a, b) => a + b, 0) / Math.max(1, done.length);
}

function showMessages() {
  const key = JSON.stringify(page.alarms);
  if (byId("alarms").dataset.key !== key) {
    byId("alarms").dataset.key = key;
    const lines = page.alarms.slice(0, 5).map(alarm => html("li", {}, `${alarm.what} `,
      page.run.kind === "nodes" ? null : html("button", { type: "button", onclick: () => select(alarm.trial) }, "show")));
    if (page.alarms.length > 5) lines.push(html("li", {}, `and ${plural(page.alarms.length - 5, "more trial")}`));
    byId("alarms").replaceChildren(...(lines.length ? [html("div", { class: "alarm" }, html("b", {}, "Lost clusters"), html("ul", {}, ...lines))] : []));
  }
  byId("problems").replaceChildren(...page.problems.map(text => html("p", { class: "problem" }, text)));
}

function select(key) {
  const trial = page.trials[key];
  if (trial) pick({ point: page.points.length ? trial.digest : null, algorithm: trial.algorithm, seed: trial.seed });
  byId("graph-section").scrollIntoView({ block: "nearest" });
}

// --- curves

const styleOf = name => page.colours?.algorithms[name] ?? { colour: "#8a8a8a", dash: "" };
const along = () => trials().some(trial => trial.timed) ? "s" : "round";

// One line per algorithm: the mean over its seeds, and these faintly behind it.
function lines(ours, measure) {
  const series = [];
  for (const name of new Set(ours.map(trial => trial.algorithm))) {
    const { colour, dash } = styleOf(name);
    const own = ours.filter(trial => trial.algorithm === name && trial[measure])
      .map(trial => ({ x: trial.x, y: trial[measure], finished: trial.state === "finished" }));
    if (own.length > 1) series.push(...own.map(each => ({ ...each, name, colour, faint: true })));
    if (own.length) series.push({ ...meanCurve(own), name, colour, dash });
  }
  return series.filter(each => each.x.length);
}

// The metric of the run: how its charts, cells and headings are written.
const written = value => score(value, page.run.metric);
const metricLabel = () => page.run.metric.percent ? page.run.metric.capitalised : capitalise(page.run.metric.label);
const capitalise = text => text.slice(0, 1).toUpperCase() + text.slice(1);
const asScore = title => ({ title, share: page.run.metric.percent, close: !page.run.metric.percent, fewer: !page.run.metric.higher_is_better, format: written });

function showCurves() {
  const ours = trials();
  const seeds = new Set(ours.filter(trial => trial.x.length).map(trial => trial.seed)).size;
  const { name, higher_is_better } = page.run.metric, direction = higher_is_better ? "" : ", less is better";
  setText(byId("score-title"), page.run.kind === "nodes" ? `Mean held-out ${name}${direction}`
    : `${metricLabel()} by algorithm${direction}${seeds > 1 ? `: mean of the finished seeds, thin lines: each` : ""}`);
  const begun = Object.values(page.trials).some(trial => trial.x.length);
  const empty = seeds ? `no ${name} in these evaluations` : begun ? "no evaluation of this point yet" : "no evaluation yet";
  scores.show(lines(ours, "score"), { along: along(), from: 0, empty, ...asScore(metricLabel()) });
  let any = false;
  for (const [measure, title, how] of MEASURES) {
    const series = lines(ours, measure);
    if (!measures.has(measure) && series.length) {
      const box = html("div", { class: "chart" });
      const cell = html("div", {}, html("h3", {}, title), box);
      measures.set(measure, { cell, chart: new Chart(box, { title, height: 165, ...how }) });
    }
    const known = measures.get(measure);
    if (known) {
      known.cell.hidden = !series.length;
      known.chart.show(series, { along: along(), from: 0 });
    }
    any = any || series.length > 0;
  }
  const cells = MEASURES.flatMap(([measure]) => measures.has(measure) ? [measures.get(measure).cell] : []);
  if (byId("measures").childElementCount !== cells.length) byId("measures").replaceChildren(...cells);
  byId("measures-section").hidden = !any;
}

function showPoints() {
  byId("points-section").hidden = !page.points.length;
  if (!page.points.length) return;
  const all = Object.values(page.trials).filter(trial => trial.score);
  const values = all.flatMap(trial => trial.score).filter(value => value !== null);
  const [low, high] = [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];
  const range = !values.length ? [0, 1] : page.run.metric.percent ? [Math.max(0, low - 0.02), 1] : [low, high];
  setText(byId("points-metric"), `${metricLabel()}${page.run.metric.higher_is_better ? "" : " (less is better)"}`);
  const until = Math.max(1, ...all.map(trial => last(trial.x)));
  const lost = new Set(page.alarms.map(alarm => page.trials[alarm.trial]?.digest));
  const cards = page.points.map(point => {
    const ours = Object.values(page.trials).filter(trial => trial.digest === point.digest);
    const series = lines(ours, "score").filter(each => !each.faint);
    const done = ours.filter(trial => trial.state === "finished").length, failed = ours.filter(trial => trial.state === "failed").length;
    const ends = series.map(each => `${each.name} ${written(last(each.y))}`).join(", ");
    return html("button", { type: "button", "aria-pressed": String(point.digest === chosen.point), title: ends, onclick: () => pick({ point: point.digest }) },
      point.label, miniature(series, until, range),
      html("span", { class: "done" }, `${done} of ${ours.length} finished`),
      failed ? html("span", { class: "done warn" }, ` · ${failed} failed`) : null,
      lost.has(point.digest) ? html("span", { class: "done warn" }, " · lost cluster") : null);
  });
  const focus = [...byId("points").children].indexOf(document.activeElement);
  byId("points").replaceChildren(...cards);
  if (focus >= 0) byId("points").children[focus]?.focus();
}

// --- the graph and what happened on it

let asking = false;

async function follow() {
  const trial = current();
  if (!trial || asking) return;
  asking = true;
  try {
    const key = keyOf(trial), query = `trial=${encodeURIComponent(key)}`;
    if (details.key !== key || details.generation !== trial.generation) {
      Object.assign(details, { key, generation: trial.generation, frames: [], log: [], by_client: [], graph: null });
      chosen.frame = null;
    }
    const after = details.frames.length ? details.frames[details.frames.length - 1].serial : -1;
    const answer = await (await fetch(`frames?${query}&after=${after}`)).json();
    if (details.key !== key || answer.generation !== details.generation) return;
    for (const [serial, x, round, clusters, away, by_cluster] of answer.frames) {
      if (details.frames.length && x === details.frames[details.frames.length - 1].x) details.frames.pop();
      details.frames.push({ serial, x, round, clusters, away, by_cluster });
    }
    Object.assign(details, { log: answer.log, by_client: answer.by_client });
    details.arrived = Date.now() / 1000;
    const nodes = details.frames.length ? details.frames[details.frames.length - 1].clusters.length : 0;
    if (!details.graph || (page.run.kind === "nodes" && details.graph.nodes !== nodes)) {
      const found = await fetch(`graph?${query}`);
      if (details.key !== key) return;
      details.graph = found.ok ? await found.json() : null;
      graph.show(details.graph);
    }
    showDetails(trial);
  } catch (error) {
    console.warn(error.message); // the server has gone; the stream says so
  } finally {
    asking = false;
    if (current() && details.key !== keyOf(current())) follow();
  }
}

function showDetails(trial) {
  const name = page.run.kind === "nodes" ? "" : `${trial.algorithm}, seed ${trial.seed}`;
  setText(byId("graph-title"), name ? `Clients: ${name}` : "Nodes");
  setText(byId("by-cluster-title"), `${metricLabel()} by cluster${name ? `: ${name}` : ""}`);
  setText(byId("log-title"), name ? `What happened: ${name}` : "What happened");
  const frames = details.frames;
  const models = Math.max(0, ...frames.map(frame => frame.by_cluster.length));
  const series = [];
  for (let j = 0; j < models; j++) {
    series.push({ name: LETTERS[j], colour: page.colours.clusters[j], x: frames.map(frame => frame.x), y: frames.map(frame => frame.by_cluster[j] ?? null) });
  }
  byId("by-cluster-section").hidden = models < 2 || !series.some(line => line.y.some(value => value !== null));
  byCluster.show(series, { along: trial.timed ? "s" : "round", from: 0, ...asScore(`${metricLabel()} by cluster`) });
  byId("log").replaceChildren(...[...details.log].reverse().map(({ when, kind, what }) =>
    html("li", {}, html("span", { class: "when" }, when), html("span", { class: kind }, what))));
  if (!details.log.length) byId("log").append(html("li", {}, html("span", { class: "when" }, ""), frames.length > 1 ? "No client has switched between evaluations." : "Nothing yet."));
  byId("truth-label").hidden = !details.graph?.clusters;
  paint();
}

const shownFrame = () => chosen.frame ?? details.frames.length - 1;

function paint() {
  const { frames } = details, at = shownFrame();
  byId("time").hidden = frames.length < 2;
  if (!frames.length || !details.graph?.nodes) {
    byId("clusters").replaceChildren();
    return;
  }
  const frame = frames[at], newestFrame = at === frames.length - 1;
  const truth = byId("colouring").value === "true" && Boolean(details.graph.clusters);
  const shown = { ...frame, metric: page.run.metric, by_client: newestFrame ? details.by_client : null };
  const { wrong, switched } = graph.paint(shown, frames[at - 1]?.clusters, page.colours.clusters, truth);
  const slider = byId("slider");
  slider.max = frames.length - 1;
  slider.value = at;
  const when = current()?.timed ? `${amount(frame.x)} s` : `round ${frame.round}`;
  setText(byId("when"), when);
  slider.setAttribute("aria-valuetext", when);
  byId("live").setAttribute("aria-pressed", String(chosen.frame === null));
  legend(truth ? count(details.graph.clusters.map(j => LETTERS[j] ?? "~").join("")) : count(frame.clusters), { truth, wrong, switched, away: frame.away.length });
}

function legend(counts, { truth, wrong, switched, away }) {
  const entries = Object.entries(counts).map(([letter, number]) => {
    const swatch = html("span", { class: "swatch" });
    swatch.style.background = page.colours.clusters[LETTERS.indexOf(letter)] ?? "var(--line)";
    const name = letter === "." ? (page.run.kind === "nodes" ? "not known" : "no model yet") : letter === "~" ? "further clusters" : `${truth ? "group" : "cluster"} ${letter}`;
    return html("span", {}, swatch, `${name}: ${number}`);
  });
  if (wrong) entries.push(html("span", {}, html("span", { class: "swatch ring" }), `not where most of its group is: ${wrong}`));
  if (switched) entries.push(html("span", {}, html("span", { class: "swatch halo" }), `just switched: ${switched}`));
  if (away) entries.push(html("span", {}, html("span", { class: "swatch hollow" }), `away: ${away}`));
  byId("clusters").replaceChildren(...entries);
}

// --- tables

function table(element, heads, rows) {
  const head = html("tr", {}, ...heads.map(([name, words]) => html("th", { scope: "col", class: words }, name)));
  element.replaceChildren(html("thead", {}, head), html("tbody", {}, ...rows));
}

function sample(name) {
  const { colour, dash } = styleOf(name);
  return svg("svg", { class: "line", viewBox: "0 0 24 12", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 24, y1: 6, y2: 6, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash || null }));
}

function showTrials() {
  byId("trials-section").hidden = page.run.kind === "nodes";
  const point = page.points.find(each => each.digest === chosen.point);
  setText(byId("trials-title"), point ? `Trials at ${point.label}` : "Trials");
  const ours = trials(), selected = current();
  const has = measure => ours.some(trial => trial[measure]);
  const heads = [["algorithm"], ["seed"], ["state", "words"], [along() === "s" ? "seconds" : "round"], [page.run.metric.name]];
  if (has("cluster_accuracy")) heads.push(["in true cluster"]);
  heads.push(["clusters in use"], ["traffic per client"]);
  if (has("staleness")) heads.push(["staleness"]);
  if (has("away")) heads.push(["away"]);
  const begun = ours.filter(trial => trial.state !== "waiting");
  const rows = begun.map(trial => {
    const end = measure => trial[measure] ? last(trial[measure]) : null;
    const cells = [html("td", {}, sample(trial.algorithm), html("button", { type: "button", onclick: () => select(keyOf(trial)) }, trial.algorithm)),
      html("td", {}, String(trial.seed)),
      html("td", { class: trial.error ? "words long" : "words" }, trial.error ? `failed: ${trial.error}` : trial.state),
      html("td", {}, trial.x.length ? amount(last(trial.x)) : "–"), html("td", {}, written(end("score")))];
    if (has("cluster_accuracy")) cells.push(html("td", {}, percent(end("cluster_accuracy"))));
    const live = end("live_clusters");
    cells.push(html("td", {}, live === null ? "–" : `${live} of ${trial.models}`), html("td", {}, bytes(end("traffic"))));
    if (has("staleness")) cells.push(html("td", {}, amount(end("staleness"))));
    if (has("away")) cells.push(html("td", {}, amount(end("away"))));
    return html("tr", { class: trial === selected ? "selected" : null }, ...cells);
  });
  setText(byId("waiting"), ours.length > begun.length ? `${plural(ours.length - begun.length, "trial")} not begun yet` : "");
  const focus = [...byId("trials").querySelectorAll("button")].indexOf(document.activeElement);
  table(byId("trials"), heads, rows);
  if (focus >= 0) byId("trials").querySelectorAll("button")[focus]?.focus();
}

function showNodes() {
  byId("nodes-section").hidden = !page.nodes?.length;
  if (!page.nodes?.length) return;
  const heads = [["node"], ["state", "words"], ["round"], ["cluster"], [page.run.metric.name], ["links"], ["staleness"], ["sent"], ["received"], ["last problem", "words"]];
  table(byId("nodes"), heads, page.nodes.map(node => html("tr", {},
    html("td", {}, node.name), html("td", { class: "words" }, node.state === "training" || !node.waits ? node.state : `${node.state}: ${node.waits}`),
    html("td", {}, amount(node.round)), html("td", {}, node.cluster === null ? "–" : `${node.cluster} of ${node.clusters}`),
    html("td", {}, written(node.score)), html("td", {}, `${node.links} of ${node.neighbours}`), html("td", {}, amount(node.staleness)),
    html("td", {}, bytes(node.bytes_out)), html("td", {}, bytes(node.bytes_in)), html("td", { class: "words long" }, node.problem || node.error))));
}
