// The engine, live: asks for its state as long as somebody sees the page.

import { ask, keyIsRight, Refusal } from "./api.js";
import { Chart } from "./chart.js";

const $ = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const BUSY = 500, IDLE = 1000, LOST = 2000; // milliseconds between two questions
const WINDOW = 2.5; // seconds that rates are the mean of
const chart = new Chart($("chart"), $("step"));
let started = null; // of the server; another one is another server
let samples = []; // states of the last seconds
let timer = 0, asking = false;

async function poll() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  let delay = LOST;
  try {
    delay = show(await state());
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) {
      connection("lost", "needs the API key");
      delay = null; // until there is a key
    } else {
      connection("lost", "disconnected, trying again");
    }
  }
  asking = false;
  if (delay !== null) timer = setTimeout(poll, delay);
}

async function state() {
  const answer = async (path) => (await ask(path, { signal: AbortSignal.timeout(5000) })).json();
  const after = started === null ? 0 : chart.last;
  let now = await answer(`engine_state?after=${after}`);
  if (now.started !== started) {
    const info = await answer("server_info");
    if (after > 0) now = await answer("engine_state?after=0");
    begin(info, now.started);
  }
  return now;
}

function begin(info, time) {
  started = time;
  samples = [];
  chart.clear();
  const length = `${whole.format(info.max_model_len)} tokens of context`;
  $("about").textContent = [info.model, info.device, info.dtype, length, `version ${info.version}`].join(" · ");
  document.title = `${info.model} · Quire`;
  document.dispatchEvent(new CustomEvent("server", { detail: info }));
}

function show(now) {
  keyIsRight();
  const stats = now.stats;
  connection(now.accepts_requests ? "live" : "lost", now.accepts_requests ? "live" : "shutting down");
  pages(stats);
  samples.push({ time: now.time, generated: stats.generated_tokens, prompts: stats.admitted_tokens });
  while (samples.length > 2 && now.time - samples[1].time >= WINDOW) samples.shift();
  const [first, last] = [samples[0], samples.at(-1)], seconds = last.time - first.time;
  const rate = (name) => (seconds > 0 ? `${whole.format((last[name] - first[name]) / seconds)}/s` : "–");
  $("running").textContent = whole.format(stats.running);
  $("waiting").textContent = whole.format(stats.waiting);
  $("generated").textContent = rate("generated");
  $("prompts").textContent = rate("prompts");
  $("hits").textContent = stats.admitted_tokens ? `${(stats.hit_rate * 100).toFixed(1)} %` : "–";
  $("preemptions").textContent = whole.format(stats.preemptions);
  $("step-count").textContent = `${whole.format(stats.steps)} since the start`;
  chart.add(now.steps, now.time);
  return stats.running + stats.waiting > 0 ? BUSY : IDLE;
}

// Pages that requests hold may be in the prefix tree, too: they count as held.
function pages(stats) {
  const cached = Math.max(0, stats.pages - stats.free_pages - stats.held_pages);
  $("page-count").textContent = `${whole.format(stats.pages)} in all, ${whole.format(stats.peak_pages)} used at most`;
  $("held").textContent = whole.format(stats.held_pages);
  $("cached").textContent = whole.format(cached);
  $("free").textContent = whole.format(stats.free_pages);
  const [held, tree] = $("pages").children;
  held.style.width = `${(stats.held_pages / stats.pages) * 100}%`;
  tree.style.width = `${(cached / stats.pages) * 100}%`;
}

function connection(kind, text) {
  $("engine").classList.toggle("stale", kind === "lost");
  if ($("connection").textContent === text) return; // which a screen reader would say again
  $("connection").dataset.state = kind;
  $("connection").textContent = text;
}

document.addEventListener("visibilitychange", poll);
document.addEventListener("key", poll);
poll();
