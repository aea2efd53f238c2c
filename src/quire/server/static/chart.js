// The timeline: a bar for each of the last steps, its duration above and its tokens below, both on a square-root
// scale: a prompt takes many times as long as a decode, and both should be seen.

const MOST = 200; // steps that are shown
const PAUSE = 0.25; // seconds between two steps that are marked
const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const milliseconds = (seconds) => `${number.format(seconds * 1000)} ms`;
const ago = (seconds) => `${Math.max(seconds, 0).toFixed(1)} s ago`;
const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

export class Chart {
  #canvas; #note; #steps = []; #now = 0; #chosen = null; // the number of a step

  constructor(canvas, note) {
    this.#canvas = canvas;
    this.#note = note;
    canvas.addEventListener("pointermove", (event) => this.#choose(this.#at(event.offsetX)));
    canvas.addEventListener("pointerleave", () => this.#choose(null));
    canvas.addEventListener("blur", () => this.#choose(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(canvas);
  }

  /** The number of the last step, 0 if there is none. */
  get last() {
    return this.#steps.at(-1)?.number ?? 0;
  }

  clear() {
    this.#steps = [];
    this.#choose(null);
  }

  /** Add steps, in order; `now` is in the same seconds as their starts. */
  add(steps, now) {
    this.#steps = [...this.#steps, ...steps].slice(-MOST);
    this.#now = now;
    if (this.#shown.some((step) => step.number === this.#chosen)) this.#draw();
    else this.#choose(null); // the chosen step, if there was one, has left the chart
    this.#relabel();
  }

  // A bar and its gap have 3 pixels at least, so narrow screens show fewer steps.
  get #slots() {
    return Math.min(MOST, Math.max(1, Math.floor(this.#canvas.clientWidth / 3)));
  }

  get #shown() {
    return this.#steps.slice(-this.#slots);
  }

  // Steps end at the right edge; when there are few, the space before them stays empty.
  #x(index) {
    return ((this.#slots - this.#shown.length + index) * this.#canvas.clientWidth) / this.#slots;
  }

  #at(x) {
    const index = Math.floor((x * this.#slots) / this.#canvas.clientWidth) - (this.#slots - this.#shown.length);
    return this.#shown[index]?.number ?? null;
  }

  #choose(chosen) {
    this.#chosen = chosen;
    this.#draw();
    const step = this.#steps.find((one) => one.number === chosen);
    this.#note.textContent = step ? this.#caption(step) : "\u00a0";
  }

  #move(event) {
    const shown = this.#shown, index = shown.findIndex((step) => step.number === this.#chosen);
    const from = index < 0 ? shown.length : index;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: shown.length - 1 }[event.key];
    if (to === undefined || !shown.length) return;
    event.preventDefault();
    this.#choose(shown[Math.min(Math.max(to, 0), shown.length - 1)].number);
  }

  #caption(step) {
    const parts = [];
    if (step.prompt_tokens) parts.push(plural(step.prompt_tokens, "prompt token"));
    if (step.decode_tokens) parts.push(plural(step.decode_tokens, "decode token"));
    const what = `${parts.join(" and ")} of ${plural(step.requests, "request")}`;
    return `Step ${step.number}: ${milliseconds(step.duration)}, ${what}`;
  }

  #relabel() {
    const shown = this.#shown;
    if (!shown.length) {
      this.#canvas.setAttribute("aria-label", "No steps yet");
      return;
    }
    const longest = Math.max(...shown.map((step) => step.duration));
    const label = `The last ${plural(shown.length, "step")}: ${milliseconds(longest)} at most; ` +
      `the latest began ${ago(this.#now - shown.at(-1).start)}`;
    this.#canvas.setAttribute("aria-label", label);
  }

  #draw() {
    const canvas = this.#canvas, context = canvas.getContext("2d"), scale = devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = canvas;
    canvas.width = width * scale;
    canvas.height = height * scale;
    context.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const color = (name) => style.getPropertyValue(`--${name}`);
    context.font = `11px ${style.fontFamily}`;
    const shown = this.#shown;
    if (!shown.length) {
      context.fillStyle = color("soft");
      context.fillText("No steps yet", 10, 20);
      return;
    }
    const middle = Math.round(height * 0.56), top = 22, bottom = height - 36;
    const longest = Math.max(...shown.map((step) => step.duration));
    const most = Math.max(...shown.map((step) => step.prompt_tokens + step.decode_tokens));
    const snap = (x) => Math.round(x * scale) / scale; // to pixels of the screen
    shown.forEach((step, i) => {
      const x = snap(this.#x(i)), bar = Math.max(snap(this.#x(i + 1)) - x - 1, 1);
      const tokens = step.prompt_tokens + step.decode_tokens;
      const share = step.prompt_tokens / tokens;
      context.globalAlpha = this.#chosen === null || this.#chosen === step.number ? 1 : 0.35;
      const up = Math.max(Math.sqrt(step.duration / longest) * (middle - top), 1);
      const down = Math.max(Math.sqrt(tokens / most) * (bottom - middle - 1), 1);
      context.fillStyle = color("decode");
      context.fillRect(x, middle - up, bar, up * (1 - share));
      context.fillRect(x, middle + 1, bar, down * (1 - share));
      context.fillStyle = color("prompt");
      context.fillRect(x, middle - up * share, bar, up * share);
      context.fillRect(x, middle + 1 + down * (1 - share), bar, down * share);
    });
    context.globalAlpha = 1;
    this.#pauses(context, shown, color("soft"), top, bottom);
    this.#labels(context, { shown, longest, most, width, height, middle, bottom, color });
  }

  #pauses(context, shown, color, top, bottom) {
    context.strokeStyle = color;
    context.setLineDash([1, 3]);
    context.beginPath();
    shown.forEach((step, i) => {
      const before = shown[i - 1];
      if (!before || step.start - (before.start + before.duration) < PAUSE) return;
      context.moveTo(this.#x(i) - 0.5, top);
      context.lineTo(this.#x(i) - 0.5, bottom);
    });
    context.stroke();
    context.setLineDash([]);
  }

  #labels(context, { shown, longest, most, width, height, middle, bottom, color }) {
    context.fillStyle = color("line");
    context.fillRect(0, middle, width, 1);
    context.fillStyle = color("soft");
    context.textAlign = "left";
    context.fillText(`${milliseconds(longest)} at most`, 8, 15);
    context.fillText(`${plural(most, "token")} at most`, 8, bottom + 13);
    context.textAlign = "right";
    context.fillText(ago(this.#now - shown.at(-1).start), width - 8, height - 8);
    context.textAlign = "left";
    context.fillText(ago(this.#now - shown[0].start), Math.min(Math.max(this.#x(0), 8), width - 120), height - 8);
  }
}
