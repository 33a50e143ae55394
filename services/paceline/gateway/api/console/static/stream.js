// Server-sent events over fetch, which unlike EventSource can send an API key and a body.

// What a server answered other than the stream asked for.
export class Refusal extends Error {
  constructor(status, message, retryAfterS) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

let key = "";

// Remembers the key until the page is left; nowhere else.
export function useKey(given) {
  key = given;
}

// Asks the gateway this page came from; refusals are thrown.
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, signal, cache: "no-store",
    body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  const retryAfterS = Number(answer.headers.get("retry-after")) || null;
  throw new Refusal(answer.status, told?.error?.message ?? `status ${answer.status}`, retryAfterS);
}

// Yields the JSON of each event until the stream ends; an error object in it is thrown.
export async function* events(path, options) {
  const answer = await ask(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const told = JSON.parse(data);
        if (told.error) throw new Refusal(answer.status, told.error.message, null);
        yield told;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
