// Requests to the server that sent this page. Paths are relative, so that the page works behind a proxy's prefix too.

let key = ""; // of the server, in memory only

/** An answer of the server that is not a success. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The response to a request with the API key, if there is one; a Refusal is thrown for an error. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  if (response.status === 401) demandKey();
  const body = await response.json().catch(() => ({}));
  throw new Refusal(response.status, body.error?.message ?? `The server answered with status ${response.status}.`);
}

/** The objects of a stream of server-sent events, until "[DONE]". */
export async function* events(response) {
  let text = "";
  for await (const piece of pieces(response.body.pipeThrough(new TextDecoderStream()))) {
    const whole = (text + piece).split("\n\n");
    text = whole.pop();
    for (const event of whole) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw new Error("The connection ended before the text did.");
}

// Not every browser can iterate over a stream.
async function* pieces(stream) {
  const reader = stream.getReader();
  for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
}

const form = document.getElementById("key-form");
const field = document.getElementById("key");

function demandKey() {
  document.getElementById("key-note").textContent = key ? "This key is wrong." : "This server demands a key.";
  if (form.hidden) {
    form.hidden = false;
    field.focus();
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  key = field.value;
  document.dispatchEvent(new Event("key"));
});

/** Hide the form of the key, which is right. */
export function keyIsRight() {
  form.hidden = true;
  field.value = "";
}
