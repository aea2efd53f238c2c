// The prompt: sends it, and shows the text as it comes.

import { ask, events } from "./api.js";

const $ = (id) => document.getElementById(id);
const output = $("output");
const numbers = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
let messages = []; // of the chat
let running = null; // the AbortController of the request in progress

const mode = () => document.querySelector("input[name=mode]:checked").value;

function body() {
  const chat = mode() === "chat";
  const given = { stream: true, stream_options: { include_usage: true } };
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) {
    if ($(name).value !== "") given[name] = Number($(name).value);
  }
  return chat ? { ...given, messages } : { ...given, prompt: $("prompt").value };
}

function turn(role) {
  const element = document.createElement("div");
  element.className = "turn";
  element.dataset.role = role;
  output.append(element);
  return element;
}

// Each part of the stream is what one step added, or several steps if the page is slow.
function add(element, text, kind) {
  const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  const part = document.createElement("span");
  part.className = kind;
  part.textContent = text;
  element.append(part);
  if (atEnd) output.scrollTop = output.scrollHeight;
}

/** Times and counts of one request. */
class Watch {
  constructor() {
    this.begin = performance.now();
    this.parts = 0;
    for (const id of ["first", "rate", "tokens", "prompt-tokens", "finish"]) $(id).textContent = "–";
  }

  part() {
    this.last = performance.now();
    this.first ??= this.last;
    this.parts += 1;
    $("first").textContent = `${numbers.format(this.first - this.begin)} ms`;
    this.count(this.parts, "~");
  }

  count(tokens, about) {
    $("tokens").textContent = `${about}${tokens}`;
    const seconds = (this.last - this.first) / 1000;
    if (tokens > 1 && seconds > 0) $("rate").textContent = `${about}${numbers.format((tokens - 1) / seconds)}/s`;
  }

  usage(usage) {
    this.count(usage.completion_tokens, "");
    const cached = usage.prompt_tokens_details.cached_tokens;
    $("prompt-tokens").textContent = `${usage.prompt_tokens} (${cached} cached)`;
  }
}

async function stream(signal, element, watch) {
  const path = mode() === "chat" ? "v1/chat/completions" : "v1/completions";
  const headers = { "Content-Type": "application/json" };
  const response = await ask(path, { method: "POST", headers, body: JSON.stringify(body()), signal });
  let text = "", reason = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) {
      const added = choice.text ?? choice.delta.content ?? "", thought = choice.delta?.reasoning_content;
      reason = choice.finish_reason ?? reason;
      watch.part();
      text += added;
      if (thought) add(element, thought, "reasoning");
      if (added) add(element, added, "part");
    }
    if (event.usage) watch.usage(event.usage);
  }
  $("finish").textContent = reason;
}

async function generate() {
  const chat = mode() === "chat", prompt = $("prompt").value;
  $("failure").textContent = "";
  if (chat) {
    messages.push({ role: "user", content: prompt });
    add(turn("user"), prompt, "given");
    $("prompt").value = "";
  } else {
    output.replaceChildren();
  }
  const element = turn("assistant");
  if (!chat) add(element, prompt, "given");
  running = new AbortController();
  showRunning(true);
  try {
    await stream(running.signal, element, new Watch());
    $("said").textContent = `Done: ${$("tokens").textContent} tokens.`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    $("finish").textContent = stopped ? "stopped" : "error";
    $("said").textContent = stopped ? "Stopped." : "";
    if (!stopped) $("failure").textContent = error.message;
  }
  running = null;
  showRunning(false);
  if (chat) keep(element, prompt);
}

// The answer joins the chat without its reasoning. A question without an answer is taken back.
function keep(element, prompt) {
  if (element.textContent) {
    const content = [...element.querySelectorAll(".part")].map((part) => part.textContent).join("");
    messages.push({ role: "assistant", content });
  } else {
    messages.pop();
    element.previousElementSibling.remove();
    element.remove();
    $("prompt").value ||= prompt;
  }
}

function showRunning(on) {
  $("generate").disabled = on;
  $("stop").disabled = !on;
  $("clear").disabled = on;
  for (const radio of document.querySelectorAll("input[name=mode]")) radio.disabled = on;
  output.classList.toggle("busy", on);
  if (on) $("said").textContent = "Generating.";
}

function clear() {
  messages = [];
  output.replaceChildren();
  $("clear").hidden = mode() !== "chat";
  $("generate").textContent = mode() === "chat" ? "Send" : "Generate";
  $("prompt").value = "";
}

$("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) generate();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("modes").addEventListener("change", clear);
$("boundaries").addEventListener("change", () => output.classList.toggle("marked", $("boundaries").checked));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && $("prompt-form").contains(event.target)) {
    event.preventDefault();
    $("prompt-form").requestSubmit($("generate"));
  }
});

// A model with a chat template chats, unless the user chooses otherwise.
document.addEventListener("server", ({ detail: info }) => {
  $("max_tokens").max = info.limits.max_tokens ?? info.max_model_len - 1;
  if (info.chat === !$("modes").hidden) return;
  $("modes").hidden = !info.chat;
  document.querySelector(`input[name=mode][value=${info.chat ? "chat" : "completion"}]`).checked = true;
  clear();
});
