// What the page does: asks GET /v1/stats again and again, and draws what it tells. Texts of the store become text
// nodes only. Nothing is stored in the browser.
"use strict";

const INTERVAL_MS = 2000;
const RARELY = 5; // turns from one question for branches and sizes to the next
const PATIENCE_MS = 10000;
const MAX_SAMPLES = 300;
const MAX_SHOWN_BLOCKS = 200;
const SERIES = 6;
const MAX_STEPS = 4; // to the right that a branch is shown at
const SVG = "http://www.w3.org/2000/svg";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const FAULT_EVENTS = ["faults", "io_faults", "breaker_opened", "lost", "broken_seals", "corrupt", "unreadable"];
const SERVER_FAULTS = ["refused_connections", "protocol_errors", "failed_requests", "slow_readers"];
const HTTP_FAULTS = ["refused_connections", "failed_handshakes", "slow_clients", "damaged_blocks"];

const state = { key: "", of: "fetch", isPaused: false, isRefused: false, turns: 0, asked: 0, rare: 0, history: [], before: null, awaySince: null, timer: 0 };
const byId = (id) => document.getElementById(id);
const seriesOf = new Map();

// ---- asking

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, body) {
  const headers = state.key ? { Authorization: `Bearer ${state.key}` } : {};
  const options = { headers, cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(PATIENCE_MS) };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (response.ok) return response.json();
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Whoever answered, it was not the store: the status says all.
  }
  throw new Refused(response.status, message);
}

// ---- figures

const total = (counts) => Object.values(counts || {}).reduce((sum, count) => sum + count, 0);

function lookupsOf(stats, of) {
  const told = stats[of] || {};
  return { requests: told.requests || 0, blocks: told.lookups_blocks || 0, hits: told.hits_blocks || {}, misses: told.misses_blocks || {} };
}

function increase(after, before) {
  return Object.fromEntries(Object.entries(after).map(([name, count]) => [name, count - (before[name] || 0)]));
}

function isStartedAnew(before, after) {
  const fell = (pick) => pick(after) < pick(before);
  return fell((stats) => total((stats.server || {}).requests)) || fell((stats) => total((stats.http || {}).requests))
    || ["fetch", "match"].some((of) => fell((stats) => lookupsOf(stats, of).blocks) || fell((stats) => lookupsOf(stats, of).requests))
    || Object.keys(before.transfers || {}).some((name) => fell((stats) => ((stats.transfers || {})[name] || { bytes: 0 }).bytes));
}

function sampleOf(stats, atMs) {
  const earlier = state.before !== null && !isStartedAnew(state.before.stats, stats) ? state.before : null;
  const seconds = earlier === null ? 0 : (atMs - earlier.atMs) / 1000;
  const sample = { time: new Date(), stats, seconds, now: {}, rates: {} };
  if (seconds > 0) {
    for (const of of ["fetch", "match"]) {
      const [after, before] = [lookupsOf(stats, of), lookupsOf(earlier.stats, of)];
      sample.now[of] = { blocks: after.blocks - before.blocks, hits: increase(after.hits, before.hits), misses: increase(after.misses, before.misses) };
    }
    for (const [name, told] of Object.entries(stats.transfers || {})) {
      const before = (earlier.stats.transfers || {})[name];
      sample.rates[name] = (told.bytes - (before ? before.bytes : 0)) / seconds;
    }
  }
  state.before = { stats, atMs };
  return sample;
}

function ratio(lookups, tier) {
  if (!lookups || !lookups.blocks) return null;
  return (tier === null ? total(lookups.hits) : lookups.hits[tier] || 0) / lookups.blocks;
}

function downOf(stats) {
  const down = [];
  for (const [name, told] of Object.entries(stats.tiers || {})) {
    if (told.is_up === false) down.push([name, told.reason || "down"]);
  }
  for (const name of ["records", "encryption"]) {
    const told = stats[name] || {};
    if (told.is_on && told.is_up === false) down.push([name, told.reason || "down"]);
  }
  return down;
}

function faultsOf(stats) {
  const spoken = (name) => name.replaceAll("_", " ");
  const found = [["overdue slots", stats.overdue_slots]];
  for (const [tier, count] of Object.entries(stats.corrupt_blocks || {})) found.push([`${tier}: corrupt blocks`, count]);
  for (const [why, count] of Object.entries(stats.write_drops_blocks || {})) found.push([`writes dropped: ${why}`, count]);
  for (const [name, told] of Object.entries(stats.transfers || {})) {
    for (const [status, count] of Object.entries(told.failures || {})) found.push([`${name}: ${status}`, count]);
  }
  for (const [place, told] of [...Object.entries(stats.tiers || {}), ["records", stats.records || {}]]) {
    for (const name of FAULT_EVENTS) found.push([`${place}: ${spoken(name)}`, (told.events || {})[name]]);
  }
  for (const name of SERVER_FAULTS) found.push([`socket: ${spoken(name)}`, (stats.server || {})[name]]);
  for (const name of HTTP_FAULTS) found.push([`http: ${spoken(name)}`, (stats.http || {})[name]]);
  return found.filter(([, count]) => count > 0).sort((one, other) => other[1] - one[1]);
}

// ---- texts

const whole = (count) => String(count).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
const percent = (part) => (part === null || part === undefined ? "–" : `${(part * 100).toFixed(1)} %`);
const perSecond = (rate) => (rate === undefined ? "–" : `${rate < 100 ? rate.toFixed(1) : whole(Math.round(rate))}/s`);
const clock = (time) => time.toLocaleTimeString([], { hour12: false });

function size(bytes) {
  let [at, unit] = [bytes, 0];
  while (at >= 1024 && unit < UNITS.length - 1) [at, unit] = [at / 1024, unit + 1];
  return `${unit ? at.toFixed(1) : Math.round(at)} ${UNITS[unit]}`;
}

function ago(seconds) {
  if (seconds < 120) return `${seconds.toFixed(0)} s ago`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min ago` : `${(seconds / 3600).toFixed(1)} h ago`;
}

// ---- elements

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function table(caption, headings, rows, kind = "") {
  const head = make("tr", {}, ...headings.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...cells]) => make("tr", {}, make("th", { scope: "row" }, ...[first].flat()),
    ...cells.map((cell) => (cell instanceof Node ? make("td", { class: "bar" }, cell) : make("td", {}, cell)))));
  return make("table", { class: kind }, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body));
}

// A region that scrolls by itself can be scrolled by keyboard only if it takes the focus.
function scrolled(element, label) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, element);
}

function seriesNumber(group, name) {
  const known = seriesOf.get(group) || new Map();
  seriesOf.set(group, known);
  if (!known.has(name)) known.set(name, 1 + (known.size % (SERIES - 1)));
  return known.get(name);
}

function swatch(number) {
  const line = draw("line", { x1: 0, y1: 5, x2: 26, y2: 5, class: `curve series-${number}` });
  return draw("svg", { class: "key", viewBox: "0 0 26 10", "aria-hidden": "true" }, line);
}

function bar(part, text, kind = "") {
  const width = Math.max(part > 0 ? 1 : 0, Math.min(100, part * 100));
  return draw("svg", { viewBox: "0 0 100 10", height: 12, preserveAspectRatio: "none", role: "img", "aria-label": text },
    draw("rect", { class: "track", x: 0, y: 0, width: 100, height: 10 }),
    draw("rect", { class: `fill ${kind}`, x: 0, y: 0, width: width.toFixed(2), height: 10 }));
}

// Lines over the samples. `lines` have a name, a series and values, null where nothing is known.
function chart(place, label, lines, { top, tell }) {
  const [width, height, left, bottom, above] = [Math.max(220, place.clientWidth || 300), 150, 4, 18, 14];
  const times = state.history.map((sample) => sample.time);
  const x = (at) => left + (width - 2 * left) * (times.length < 2 ? 1 : at / (times.length - 1));
  const y = (value) => above + (height - above - bottom) * (1 - value / top);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  for (const part of [0, 0.5, 1]) svg.append(draw("line", { class: "axis", x1: left, x2: width - left, y1: y(part * top), y2: y(part * top) }));
  const step = (width - 2 * left) / Math.max(1, times.length - 1);
  state.history.forEach((sample, at) => {
    if (!sample.stats) svg.append(draw("rect", { class: "away", x: x(at) - step / 2, y: above, width: step, height: height - above - bottom }));
  });
  for (const { name, series, values } of lines) {
    svg.append(draw("path", { class: `curve series-${series}`, d: pathOf(values, x, y), "data-name": name }));
  }
  for (const part of [0.5, 1]) svg.append(draw("text", { x: left + 2, y: y(part * top) - 3 }, tell(part * top)));
  if (times.length) {
    svg.append(draw("text", { x: left, y: height - 4 }, clock(times[0])));
    svg.append(draw("text", { x: width - left, y: height - 4, "text-anchor": "end" }, clock(times.at(-1))));
  }
  place.replaceChildren(svg);
}

function pathOf(values, x, y) {
  let [path, isDrawing] = ["", false];
  values.forEach((value, at) => {
    if (value === null || value === undefined) {
      isDrawing = false;
      return;
    }
    // A point without neighbours is a line of no length, which would not show.
    path += `${isDrawing ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    if (!isDrawing) path += `h0.1`;
    isDrawing = true;
  });
  return path;
}

// ---- sections

const bodyOf = (section) => byId(section).querySelector(".body");
const chartOf = (section) => byId(section).querySelector(".chart");

function showFaults({ stats }) {
  const [down, faults] = [downOf(stats), faultsOf(stats)];
  const parts = down.map(([name, why]) => make("p", { class: "bad" }, `${name} is down: ${why}`));
  if (!down.length) parts.push(make("p", { class: "good" }, faults.length ? "Every tier is up." : "None: every tier is up."));
  if (faults.length) {
    parts.push(table("since the start of the store", ["what", "count"], faults.map(([name, count]) => [name, whole(count)])));
  }
  bodyOf("faults").replaceChildren(...parts);
}

function showHits(sample) {
  const [all, now] = [lookupsOf(sample.stats, state.of), sample.now[state.of]];
  const tiers = [...new Set([...Object.keys(sample.stats.tiers || {}), ...Object.keys(all.hits)])];
  const rows = [null, ...tiers].map((tier) => {
    const series = tier === null ? 0 : seriesNumber("tiers", tier);
    return { tier, name: tier === null ? "all tiers" : tier, series };
  });
  const lines = rows.map(({ tier, name, series }) => ({ name, series, values: state.history.map((at) => (at.stats ? ratio(at.now[state.of], tier) : null)) }));
  const said = rows.map(({ tier, name }) => `${name} ${percent(ratio(now, tier))}`).join(", ");
  chart(chartOf("hits"), `Hit rate of ${state.of} over time; at the end: ${said}`, lines, { top: 1, tell: (value) => `${value * 100} %` });
  bodyOf("hits").replaceChildren(table(`Blocks of ${state.of}: ${whole(all.blocks)} looked up by ${whole(all.requests)} requests`, ["tier", "now", "total", "blocks"],
    rows.map(({ tier, name, series }) => [[swatch(series), name], percent(ratio(now, tier)), percent(ratio(all, tier)), whole(tier === null ? total(all.hits) : all.hits[tier] || 0)])));
}

function showOccupancy({ stats }) {
  bodyOf("occupancy").replaceChildren(...Object.entries(stats.tiers || {}).map(([name, told]) => {
    const part = told.capacity_bytes ? told.used_bytes / told.capacity_bytes : null;
    const text = part === null ? "no limit of its own" : `${percent(part)}: ${size(told.used_bytes)} of ${size(told.capacity_bytes)}`;
    const notes = [told.blocks === undefined ? "" : `${whole(told.blocks)} blocks`, told.queued_blocks === undefined ? "" : `${whole(told.queued_blocks)} queued`];
    return make("div", { class: "item", "data-tier": name },
      make("p", { class: "between" }, make("strong", {}, name), make("span", {}, text)),
      part === null ? null : bar(part, `${name} ${text}`, told.is_up === false ? "problem" : ""),
      make("p", { class: "note" }, notes.filter(Boolean).join(", ")));
  }));
}

function showTransfers(sample) {
  const names = Object.keys(sample.stats.transfers || {});
  const lines = names.map((name) => ({ name, series: seriesNumber("transfers", name), values: state.history.map((at) => (at.stats && name in at.rates ? at.rates[name] : null)) }));
  const top = Math.max(1024, ...lines.flatMap((line) => line.values.map((value) => value || 0)));
  const said = names.map((name) => `${name} ${name in sample.rates ? `${size(sample.rates[name])}/s` : "unknown"}`).join(", ");
  chart(chartOf("transfers"), `Bytes per second over time; at the end: ${said || "none yet"}`, lines, { top, tell: (value) => `${size(value)}/s` });
  bodyOf("transfers").replaceChildren(table("from->to", ["transfer", "now", "total", "blocks"], names.map((name) => {
    const told = sample.stats.transfers[name];
    return [[swatch(seriesNumber("transfers", name)), name], name in sample.rates ? `${size(sample.rates[name])}/s` : "–", size(told.bytes), whole(told.blocks)];
  })));
}

function showMisses(sample) {
  const [all, now] = [lookupsOf(sample.stats, state.of), sample.now[state.of]];
  const misses = total(all.misses);
  const rows = Object.entries(all.misses).sort((one, other) => other[1] - one[1]).map(([reason, count]) => [
    reason, bar(count / misses, `${reason} ${percent(count / misses)} of the misses`, "miss"),
    perSecond(now ? (now.misses[reason] || 0) / sample.seconds : undefined), whole(count)]);
  bodyOf("misses").replaceChildren(rows.length ? table(`${whole(misses)} blocks of ${state.of} missed`, ["reason", "", "now", "total"], rows)
    : make("p", {}, `No block of ${state.of} has missed.`));
}

function showActivity({ stats }) {
  const listed = (counts) => Object.entries(counts || {}).filter(([, count]) => count).map(([name, count]) => `${whole(count)} ${name}`).join(", ") || "none";
  const rows = [["leases", whole(stats.live_leases || 0)], ["clients", whole(stats.owners || 0)], ["loads under way", whole(stats.loads || 0)],
    ["puts, blocks", listed(stats.puts_blocks)], ["evictions, blocks", listed(stats.evictions_blocks)]];
  const server = stats.server || {};
  if (server.resident_bytes) rows.push(["memory of the process", size(server.resident_bytes)]);
  bodyOf("activity").replaceChildren(table("now, and since the start", ["what", "how many"], rows, "words"));
}

function show() {
  const sample = state.history.findLast((at) => at.stats);
  if (!sample) return;
  showFaults(sample);
  showHits(sample);
  showOccupancy(sample);
  showTransfers(sample);
  showMisses(sample);
  showActivity(sample);
}

// ---- branches and sizes, which any key with the scope read is told of, as far as they are its own

const lookedUp = (branch) => Math.max(branch.match.lookups, branch.fetch.lookups);

// Parents before what leaves them, each below the other; those whose parent is not told begin at the left.
function nested(branches) {
  const name = (branch, key) => `${branch.namespace} ${key}`;
  const told = new Set(branches.map((branch) => name(branch, branch.key)));
  const leaving = new Map();
  for (const branch of branches) {
    const parent = told.has(name(branch, branch.parent)) ? name(branch, branch.parent) : null;
    leaving.set(parent, [...(leaving.get(parent) || []), branch]);
  }
  // Each once, even if one has the key of what it leaves: a client may name blocks as it likes.
  const under = (parent, depth) => {
    const below = leaving.get(parent) || [];
    leaving.delete(parent);
    return below.flatMap((branch) => [[branch, depth], ...under(name(branch, branch.key), depth + 1)]);
  };
  return under(null, 0);
}

function whose(branch) {
  const tenant = branch.tenant === null ? "unknown" : branch.tenant.slice(0, 12);
  return `${branch.namespace.slice(0, 12)} / ${tenant}`;
}

function branchRow([branch, depth], most) {
  const { lookups, hits } = branch[state.of];
  const twig = depth ? make("span", { class: "twig", "aria-label": `branch of ${branch.parent.slice(0, 12)} from block ${branch.leaves_at_blocks} on` }, `${"\u2007\u2007".repeat(Math.min(depth, MAX_STEPS) - 1)}└ `) : "";
  const tiers = Object.entries(branch.tiers).map(([tier, blocks]) => `${tier} ${whole(blocks)}`).join(", ");
  const share = lookedUp(branch) / most;
  return [[twig, make("code", { title: branch.key }, branch.key.slice(0, 12))], bar(share, `${percent(share)} of the hottest`), whole(lookups),
    percent(lookups ? hits / lookups : null), whole(branch.blocks), whole(branch.tokens), tiers || "nowhere", ago(branch.last_use_s), whose(branch)];
}

function showBranches(told) {
  if (!told.is_on || !told.branches.length) {
    const text = told.is_on ? "Nothing was looked up lately." : "Branches are not counted.";
    bodyOf("branches").replaceChildren(make("p", {}, text));
    return;
  }
  const most = Math.max(...told.branches.map(lookedUp));
  const headings = ["last block", "", `${state.of}es`, "whole", "blocks", "tokens", "where, blocks", "last use", "namespace / tenant"];
  const minutes = whole(Math.round(told.window_s / 60));
  const caption = `${whole(told.lookups)} lookups in the last ${minutes} minutes; whole: all of the branch was found`;
  const rows = nested(told.branches).map((row) => branchRow(row, most));
  const words = make("p", { class: "note" }, "A branch is a prefix that many lookups share; below it, those that leave it. Names are digests.");
  // What is replaced would lose the focus, and where it is scrolled to.
  const before = document.querySelector("#branches .scroll");
  const [left, top, isFocused] = before ? [before.scrollLeft, before.scrollTop, before === document.activeElement] : [0, 0, false];
  const region = scrolled(table(caption, headings, rows), "Hottest branches");
  bodyOf("branches").replaceChildren(region, words);
  [region.scrollLeft, region.scrollTop] = [left, top];
  if (isFocused) region.focus();
}

function showSize(told) {
  const known = told.is_on ? told.points.filter(([, ratio]) => ratio !== null) : [];
  if (!known.length) {
    const text = told.is_on ? `Too few lookups to tell: ${whole(told.samples)} of ${whole(told.min_samples)} samples.` : "Sizes are not estimated.";
    chartOf("size").replaceChildren();
    bodyOf("size").replaceChildren(make("p", {}, text));
    return;
  }
  drawSizes(known, told.size_bytes);
  const multiples = ["0.5x", "1x", "2x", "4x"];
  const rows = Object.entries(told.hit_ratio).map(([of, ratios]) => [of === "all" ? "all tiers of this node" : of, size(told.size_bytes[of]), ...multiples.map((name) => percent(ratios[name]))]);
  const caption = `Estimated hit rate at multiples of the size there is, from ${whole(told.samples)} samples`;
  bodyOf("size").replaceChildren(scrolled(table(caption, ["of", "size now", ...multiples], rows), "Hit rate by size"));
}

// The curve over sizes, each doubling as wide as any other; upright lines are the sizes there are.
function drawSizes(points, sizes) {
  const place = chartOf("size");
  const [width, height, left, bottom, above] = [Math.max(220, place.clientWidth || 300), 170, 4, 18, 14];
  const [least, most] = [Math.log2(points[0][0]), Math.log2(points.at(-1)[0])];
  const x = (bytes) => left + (width - 2 * left) * (most > least ? (Math.log2(bytes) - least) / (most - least) : 1);
  const y = (ratio) => above + (height - above - bottom) * (1 - ratio);
  const said = points.filter((_, at) => at % 8 === (points.length - 1) % 8).map(([bytes, ratio]) => `${size(bytes)} ${percent(ratio)}`).join(", ");
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Estimated hit rate by size: ${said}` });
  for (const part of [0, 0.5, 1]) svg.append(draw("line", { class: "axis", x1: left, x2: width - left, y1: y(part), y2: y(part) }));
  const now = Object.entries(sizes).filter(([, bytes]) => bytes >= points[0][0] && bytes <= points.at(-1)[0]);
  for (const [, bytes] of now) svg.append(draw("line", { class: "now", x1: x(bytes), x2: x(bytes), y1: above, y2: height - bottom }));
  const line = points.map(([bytes, ratio], at) => `${at ? "L" : "M"}${x(bytes).toFixed(1)} ${y(ratio).toFixed(1)}`).join("");
  svg.append(draw("path", { class: "curve series-1", d: `${line}h0.1`, "data-name": "size" }));
  for (const part of [0.5, 1]) svg.append(draw("text", { x: left + 2, y: y(part) - 3 }, `${part * 100} %`));
  now.forEach(([of, bytes], at) => {
    const isRight = x(bytes) > width * 0.7;
    svg.append(draw("text", { x: x(bytes) + (isRight ? -4 : 4), y: above + 12 + 14 * at, "text-anchor": isRight ? "end" : "start" }, `${of} now`));
  });
  svg.append(draw("text", { x: left, y: height - 4 }, size(points[0][0])), draw("text", { x: width - left, y: height - 4, "text-anchor": "end" }, size(points.at(-1)[0])));
  place.replaceChildren(svg);
}

const RARE = [["branches", "v1/branches", showBranches], ["size", "v1/size", showSize]];
const rarely = new Map();

async function askRarely(failure) {
  const number = ++state.rare;
  const isUnknown = failure instanceof Refused && failure.status === 401;
  for (const [section, path, draw] of RARE) {
    try {
      // A key that is not known would only be refused again, and counted.
      if (isUnknown) throw failure;
      const told = await ask(path);
      if (number !== state.rare) return;
      rarely.set(section, told);
      draw(told);
    } catch (error) {
      if (number !== state.rare) return;
      // While the store is away the figures from before stay, as all others do.
      if (!(error instanceof Refused)) return;
      rarely.delete(section);
      if (section === "size") chartOf("size").replaceChildren();
      bodyOf(section).replaceChildren(make("p", {}, `Not told: ${error.message}.`));
    }
  }
  byId("main").classList.toggle("keyless", rarely.size > 0 && state.isRefused);
}

function showRarely() {
  for (const [section, , draw] of RARE) if (rarely.has(section)) draw(rarely.get(section));
}

function say(text, kind = "") {
  const status = byId("status");
  // A screen reader reads what changes: the same words again are not told again.
  if (status.textContent !== text) status.replaceChildren(text);
  status.className = kind;
  byId("main").classList.toggle("stale", kind === "bad");
}

// ---- turns

async function turn() {
  window.clearTimeout(state.timer);
  const number = ++state.turns;
  let [stats, failure] = [null, null];
  try {
    stats = await ask("v1/stats");
  } catch (error) {
    failure = error;
  }
  // Another turn was begun meanwhile, with another key perhaps: its answer counts.
  if (number !== state.turns) return;
  if (failure === null) {
    if (state.before === null) listNamespaces();
    state.history.push(sampleOf(stats, performance.now()));
    [state.isRefused, state.awaySince] = [false, null];
    byId("key-form").hidden = !state.key;
    say(state.isPaused ? "Paused" : "Up", state.isPaused ? "" : "good");
  } else {
    away(failure);
  }
  state.history.splice(0, state.history.length - MAX_SAMPLES);
  show();
  if (state.asked++ % RARELY === 0 || state.isRefused) askRarely(failure);
  if (!state.isPaused && !state.isRefused) state.timer = window.setTimeout(turn, INTERVAL_MS);
}

function away(error) {
  state.before = null;
  if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
    state.isRefused = true;
    byId("key-form").hidden = false;
    const what = error.status === 401 && !state.key ? "The store wants an API key" : `The store refuses: ${error.message}`;
    say(`${what}. Enter one below.`, "bad");
    return;
  }
  if (state.awaySince === null) state.awaySince = new Date();
  const why = error instanceof Refused ? error.message : "no answer";
  state.history.push({ time: new Date(), stats: null, now: {}, rates: {} });
  say(`Away since ${clock(state.awaySince)}: ${why}. It is asked again; the figures are from before.`, "bad");
}

async function listNamespaces() {
  try {
    const { namespaces } = await ask("v1/admin/namespaces");
    byId("namespaces").replaceChildren(...namespaces.filter((space) => space.digest).map((space) => {
      const parts = [space.model, space.adapter, `epoch ${space.epoch}`, `${space.layout.block_tokens} tokens a block`];
      return make("option", { value: space.digest }, parts.filter(Boolean).join(", "));
    }));
  } catch {
    // They are a convenience: a digest can be typed, and what is wrong is said where stats are asked for.
  }
}

// ---- why

function whyBody(namespace, text) {
  const trimmed = text.trim();
  if (trimmed.startsWith("{")) {
    const { namespace: named, keys, tokens, start, parent, part } = JSON.parse(trimmed);
    return { namespace: named || namespace, keys, tokens, start, parent, part };
  }
  const words = trimmed.split(/[\s,;[\]"']+/).filter(Boolean);
  if (words.length && words.every((word) => /^[0-9a-f]{64}$/i.test(word))) return { namespace, keys: words.map((word) => word.toLowerCase()) };
  if (words.length && words.every((word) => /^\d{1,10}$/.test(word))) return { namespace, tokens: words.map(Number) };
  throw new SyntaxError("keys have 64 hex digits each, tokens are numbers");
}

function whyRow(report) {
  const gone = "gone_s" in report ? `${report.gone_from}, ${ago(report.gone_s)}` : "";
  const notes = [report.is_leased ? "leased" : "", report.pressed_by ? `room for ${report.pressed_by}` : "", report.siblings ? `${report.siblings} siblings` : ""];
  return [String(report.index), report.key.slice(0, 12), report.tiers.join(", ") || "nowhere", report.reason || "stored", gone, notes.filter(Boolean).join(", ")];
}

function showWhy(blocks) {
  if (!blocks.length) return [make("p", {}, "These tokens make no full block.")];
  const first = blocks.findIndex((report) => report.reason !== null);
  const stored = first < 0 ? blocks.length : first;
  const parts = [make("p", {}, `${whole(stored)} of ${whole(blocks.length)} blocks are stored as a prefix.`)];
  if (first >= 0) {
    const behind = blocks.slice(first + 1);
    const kept = behind.filter((report) => report.tiers.length).length;
    parts.push(make("p", { class: "bad" }, `Block ${blocks[first].index} misses: ${blocks[first].reason}.`));
    if (behind.length) parts.push(make("p", {}, `${whole(behind.length)} blocks behind it cannot be used; ${whole(kept)} of them are stored.`));
  }
  const begin = Math.max(0, Math.min(stored - MAX_SHOWN_BLOCKS / 2, blocks.length - MAX_SHOWN_BLOCKS));
  const shown = blocks.slice(begin, begin + MAX_SHOWN_BLOCKS);
  const caption = shown.length < blocks.length ? `${shown.length} of the ${blocks.length} blocks` : "every block";
  parts.push(scrolled(table(caption, ["block", "key", "tiers", "why", "gone from", "notes"], shown.map(whyRow), "words"), "Blocks of the request"));
  return parts;
}

async function askWhy(event) {
  event.preventDefault();
  const answer = byId("answer");
  answer.replaceChildren(make("p", {}, "Asking …"));
  try {
    const { blocks } = await ask("v1/why", whyBody(byId("namespace").value.trim().toLowerCase(), byId("blocks").value));
    answer.replaceChildren(...showWhy(blocks));
  } catch (error) {
    const what = error instanceof Refused || error instanceof SyntaxError ? error.message : "no answer";
    answer.replaceChildren(make("p", { class: "bad" }, `No report: ${what}.`));
  }
}

// ---- controls

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = byId("key").value.trim();
  byId("key").value = "";
  state.asked = 0;
  turn();
});
byId("lookups").addEventListener("change", (event) => {
  state.of = event.target.value;
  show();
  showRarely();
});
byId("pause").addEventListener("click", () => {
  state.isPaused = !state.isPaused;
  byId("pause").setAttribute("aria-pressed", String(state.isPaused));
  if (state.isPaused) {
    window.clearTimeout(state.timer);
    say("Paused");
  } else {
    turn();
  }
});
byId("why-form").addEventListener("submit", askWhy);
byId("namespace").addEventListener("focus", () => state.isRefused || listNamespaces());
window.addEventListener("resize", () => {
  show();
  showRarely();
});
turn();
