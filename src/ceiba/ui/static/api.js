// The way to the server: keys, errors with the server's own words, and server-sent events.

const STORE = "ceiba-key";

export const key = {
  get: () => sessionStorage.getItem(STORE) ?? "",
  set: (value) => (value ? sessionStorage.setItem(STORE, value) : sessionStorage.removeItem(STORE)),
};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function send(path, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}) };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  return response;
}

async function failure(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {}
  return new ApiError(response.status, message);
}

export async function get(path, accepted = []) {
  const response = await send(path);
  if (!response.ok && !accepted.includes(response.status)) throw await failure(response);
  return response.json();
}

export async function post(path, body) {
  const response = await send(path, { method: "POST", body: body ? JSON.stringify(body) : undefined });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Yields the JSON of each event. Leaving the loop, or aborting `signal`, ends the request. */
export async function* events(path, body, signal) {
  const response = await send(path, { method: "POST", body: JSON.stringify(body), signal });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "The server closed the stream before its end.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.status ?? 500, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
