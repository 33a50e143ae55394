// The same completion with and without speculation, token by token in the colour of how each came about.

import { ask, events } from "./stream.js";

const PROMPT = 'def parse_header(line):\n    """Return';
const element = (id) => document.getElementById(id);

class Run {
  constructor(article) {
    this.facts = article.querySelector(".facts");
    this.pre = article.querySelector(".text");
  }

  clear(prompt) {
    this.text = "";
    this.record = null;
    this.usage = null;
    this.counts = { accepted: 0, recovered: 0, bonus: 0, plain: 0 };
    this.startedMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.numTokens = 0;
    this.firstTokens = 0;
    this.facts.replaceChildren();
    const given = document.createElement("span");
    given.className = "given";
    given.textContent = prompt;
    this.pre.replaceChildren(given);
  }

  take(chunk) {
    const choice = chunk.choices[0];
    if (choice?.token_fates?.length) {
      this.lastMs = performance.now();
      this.numTokens += choice.token_fates.length;
      if (this.firstMs === null) {
        this.firstMs = this.lastMs;
        this.firstTokens = this.numTokens;
      }
      this.pre.append(...choice.token_fates.map((token) => this.token(token)));
      this.pre.scrollTop = this.pre.scrollHeight;
    }
    this.text += choice?.text ?? "";
    this.record = chunk.metrics?.speculative_decoding ?? this.record;
    this.usage = chunk.usage ?? this.usage;
    this.show();
  }

  token({ text, fate }) {
    const span = document.createElement("span");
    span.className = `token ${fate ?? "plain"}`;
    span.title = fate ?? "not told";
    span.textContent = text;
    if (fate) this.counts[fate] += 1;
    return span;
  }

  // Tokens a second after the first piece, which waits for the prompt.
  get tokensPerS() {
    const decodedS = (this.lastMs - this.firstMs) / 1e3;
    return this.firstMs === null || decodedS <= 0 ? null : (this.numTokens - this.firstTokens) / decodedS;
  }

  show() {
    const facts = [["tokens", this.numTokens]];
    if (this.firstMs !== null) facts.push(["first after", `${Math.round(this.firstMs - this.startedMs)} ms`]);
    if (this.tokensPerS !== null) facts.push(["tokens/s", this.tokensPerS.toFixed(0)]);
    if (this.record) {
      facts.push(["steps", this.record.num_steps]);
      facts.push(["mean acceptance length", this.record.mean_acceptance_length.toFixed(2)]);
    }
    for (const [fate, count] of Object.entries(this.counts)) if (count) facts.push([fate, count]);
    this.facts.replaceChildren(...facts.map(([name, value]) => {
      const pair = document.createElement("div");
      const term = document.createElement("dt");
      const told = document.createElement("dd");
      term.textContent = name;
      told.textContent = value;
      pair.append(term, told);
      return pair;
    }));
  }
}

function wanted() {
  const body = {
    prompt: element("prompt").value,
    max_tokens: element("max-tokens").valueAsNumber,
    temperature: element("temperature").valueAsNumber,
    seed: element("seed").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (element("model").value) body.model = element("model").value;
  return body;
}

function say(text, state) {
  element("verdict").textContent = text;
  element("verdict").dataset.state = state;
}

function compare(on, off) {
  const faster = on.tokensPerS && off.tokensPerS ? `; ${(on.tokensPerS / off.tokensPerS).toFixed(2)} × the speed` : "";
  const fewer = on.record && off.record
    ? `; ${on.record.num_steps} steps of the target instead of ${off.record.num_steps}` : "";
  if (on.text === off.text) say(`Identical: ${on.text.length} characters, every one the same${fewer}${faster}.`, "good");
  else say("The texts differ: see “Same text” in the docs of the console.", "bad");
}

// Readies the playground; `onRefusal` is told what the gateway refuses.
export function readyPlayground(onRefusal) {
  const on = new Run(element("with"));
  const off = new Run(element("without"));
  let running = null;
  element("prompt").value = PROMPT;

  async function run(one, body, enabled, signal) {
    one.clear(body.prompt);
    const asked = { ...body, speculation: { enabled, token_fates: true } };
    for await (const chunk of events("v1/completions", { body: asked, signal })) one.take(chunk);
  }

  element("play").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    element("run").disabled = true;
    element("stop").disabled = false;
    const body = wanted();
    off.clear(body.prompt);
    try {
      say("Running with speculation…", "");
      await run(on, body, true, running.signal);
      say("Running without…", "");
      await run(off, body, false, running.signal);
      compare(on, off);
    } catch (error) {
      say(running.signal.aborted ? "Stopped." : error.message, running.signal.aborted ? "" : "bad");
      if (!running.signal.aborted) onRefusal(error);
    } finally {
      running = null;
      element("run").disabled = false;
      element("stop").disabled = true;
    }
  });
  element("stop").addEventListener("click", () => running?.abort());
}

// Offers the models that the gateway serves, if there is a choice.
export async function offerModels() {
  const answer = await ask("v1/models");
  const names = (await answer.json()).data.map((model) => model.id);
  element("model").replaceChildren(...names.map((name) => new Option(name, name)));
  element("model-label").hidden = names.length < 2;
  return names;
}
