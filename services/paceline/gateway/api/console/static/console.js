// The console: rates from two answers of the gateway, its replicas, and a completion with and without speculation.

const WINDOW = 300; // looks that are drawn
const NARROWEST = 60; // and that a plot has room for at first
const SMOOTHED = 3; // looks that a rate is taken over
const PAUSE_MS = 1000;
const HEAD = 14; // of a plot's height of 100, above the lines, for its scale
const GONE_S = 60; // for which a replica is shown that is not there any more
const PROMPT = 'def parse_header(line):\n    """Return';
const TIERS = ["gateway", "verifier", "drafter"];
const STATES = {
  ready: ["good", ""],
  "no drafter": ["warn",
    "No drafter is running: verifiers decode plainly, or with guesses of their own. The text is the same, the speed lower."],
  "no verifier": ["bad", "No verifier is running: requests wait for one, and are refused if none starts."],
};
// Why a verifier drafts, or decodes plainly.
const REASONS = {
  pays: "drafts pay",
  trying: "both are being compared at this load",
  no_drafter: "speculation is off in these requests, or nobody drafts for them",
  too_loaded: "too many sessions for drafts to pay; not tried yet",
  did_not_pay: "drafts did not pay when measured at this load",
  fixed: "set so",
};
const PANELS = [
  { title: "Tokens per second", about: "green: all; blue: the target's own", unit: "", digits: 0,
    lines: [["accepted", (d) => (d.turns + d.accepted) / d.seconds], ["own", (d) => d.turns / d.seconds]] },
  { title: "Acceptance", about: "verified draft tokens that matched", unit: "%", digits: 0, top: 100,
    lines: [["accepted", (d) => (100 * d.accepted) / d.drafted]] },
  { title: "Gamma", about: "draft tokens per session and step", unit: "", digits: 1,
    lines: [["accepted", (d) => d.drafted / d.turns]] },
  { title: "Batch size", about: "decoding sessions of a step", unit: "sessions", digits: 1,
    lines: [["own", (d) => d.turns / d.steps]] },
];
const find = (id) => document.getElementById(id);

// Only what has changed is written: screen readers read these aloud.
function write(node, text, state) {
  if (node.textContent !== text) node.textContent = text;
  if (state !== undefined) node.dataset.state = state;
}

function made(name, className, text) {
  const node = document.createElement(name);
  node.className = className;
  node.textContent = text ?? "";
  return node;
}

// The gateway

class Refusal extends Error {
  constructor(status, message, retryAfterS) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

let key = ""; // kept until the page is left, nowhere else

async function ask(path, { body, signal } = {}) {
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { "content-type": "application/json" }) };
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, signal, cache: "no-store",
    body: body && JSON.stringify(body) });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Refusal(answer.status, told?.error?.message ?? `status ${answer.status}`, answer.headers.get("retry-after"));
}

// Yields the JSON of each server-sent event; EventSource could send neither a key nor a body.
async function* events(path, options) {
  const answer = await ask(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const data of parts.map((part) => part.replace(/^data: /, ""))) {
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new Refusal(answer.status, told.error.message);
      yield told;
    }
  }
}

// Figures

const looks = [];
const rates = [];

// What all verifiers did together since an earlier look; null where none was read both times, or one started anew.
function between(before, now) {
  const sums = { seconds: now.at_s - before.at_s, steps: 0, turns: 0, drafted: 0, accepted: 0 };
  const earlier = new Map(before.replicas.map((each) => [each.id, each.counters]));
  for (const { id, counters } of now.replicas) {
    const old = earlier.get(id);
    if (!counters || !old || counters.turns < old.turns) continue;
    for (const name in counters) sums[name] += counters[name] - old[name];
  }
  return sums.seconds > 0 ? sums : null;
}

function drawPanels() {
  find("figures").replaceChildren(...PANELS.map((panel) => {
    const article = made("article", "");
    const head = made("div", "figure-head");
    panel.output = made("output", "");
    panel.scale = made("span", "scale");
    panel.since = made("span", "");
    head.append(made("h3", "", panel.title), panel.output);
    panel.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    panel.svg.setAttribute("preserveAspectRatio", "none");
    panel.svg.setAttribute("role", "img");
    panel.paths = panel.lines.map(([colour]) => {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", colour);
      panel.svg.append(path);
      return path;
    });
    const plot = made("div", "plot");
    plot.append(panel.svg, panel.scale);
    const axis = made("p", "axis");
    axis.append(panel.since, made("span", "", "now"));
    article.append(head, made("p", "about", panel.about), plot, axis);
    return article;
  }));
}

function drawRates() {
  const width = Math.max(NARROWEST, rates.length);
  for (const panel of PANELS) {
    panel.svg.setAttribute("viewBox", `0 ${-HEAD} ${width} ${100 + HEAD}`);
    const lines = panel.lines.map(([, of]) => rates.map((sums) => (sums ? of(sums) : NaN)));
    const top = panel.top ?? Math.max(1, 1.1 * Math.max(0, ...lines.flat().filter(Number.isFinite)));
    lines.forEach((values, index) => {
      let pen = "M";
      panel.paths[index].setAttribute("d", values.map((value, at) => {
        const point = Number.isFinite(value) ? `${pen}${width - values.length + at + 1} ${100 - (100 * value) / top}` : "";
        pen = point ? "L" : "M";
        return point;
      }).join(""));
    });
    const latest = lines[0].at(-1);
    const digits = latest && latest < 10 ? Math.max(1, panel.digits) : panel.digits;
    const shown = Number.isFinite(latest) ? latest.toFixed(digits) : "–";
    panel.output.replaceChildren(shown, made("span", "unit", Number.isFinite(latest) ? panel.unit : ""));
    write(panel.scale, lines.flat().some(Number.isFinite) ? top.toFixed(top < 10 ? 1 : 0) : "");
    write(panel.since, `${lasting((width * PAUSE_MS) / 1e3)} ago`);
    panel.svg.setAttribute("aria-label", `${panel.title}: ${shown} ${panel.unit}`);
  }
}

// What one replica did since an earlier look.
function since(before, now, replica) {
  const old = before?.replicas.find((each) => each.id === replica.id);
  return old && between({ ...before, replicas: [old] }, { ...now, replicas: [replica] });
}

function lasting(seconds) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}

// Why a verifier is in its mode; where a drafter is there, it is the requests that want none.
function whyOf({ reason }, roles) {
  if (reason === "no_drafter" && roles.has("drafter")) return "speculation is off in these requests";
  return REASONS[reason] ?? reason;
}

// The speed-up that a verifier has measured at the load nearest to its batch: what it was, and how long ago.
function gainOf(replica, own) {
  const octaves = ({ load }) => Math.abs(Math.log2(load / (own.turns / own.steps)));
  const nearest = Math.min(...replica.rates.map(octaves));
  const here = replica.rates.filter((each) => octaves(each) === nearest);
  const plain = here.find(({ mode }) => mode === "plain");
  const other = here.find(({ mode }) => mode === (replica.mode.mode === "plain" ? "drafting" : replica.mode.mode));
  if (!plain || !other) return null;
  const ageS = Math.max(plain.age_s, other.age_s);
  return { ratio: (other.tokens_per_s / plain.tokens_per_s).toFixed(2), load: other.load, age: lasting(ageS) };
}

// A verifier's mode in a sentence: with its gain where that was measured, else with its reason.
function modeOf(replica, own, roles) {
  const gain = gainOf(replica, own);
  if (!gain) return `${replica.mode.mode}: ${whyOf(replica.mode, roles)}`;
  const where = `at ${gain.load} ${gain.load === 1 ? "session" : "sessions"}, measured ${gain.age} ago`;
  if (replica.mode.mode !== "plain") return `${replica.mode.mode}: ${gain.ratio} × plain ${where}`;
  return `plain: ${whyOf(replica.mode, roles)}; drafting gave ${gain.ratio} × plain ${where}`;
}

// Share of verified draft tokens that matched: of a verifier's steps, or of a drafter's guesses at all verifiers.
function acceptedOf(replica, before, own) {
  const [old, now] = [before?.replicas.find((each) => each.id === replica.id)?.guesses, replica.guesses];
  const share = now ? (now.accepted - old?.accepted) / (now.verified - old?.verified) : own?.accepted / own?.drafted;
  return share >= 0 && share <= 1 ? `${(100 * share).toFixed(0)} %` : "";
}

function cells(replica, before, now, roles) {
  const own = since(before, now, replica);
  const perS = (own?.turns + own?.accepted) / own?.seconds;
  const works = replica.mode && own?.turns;
  const mode = works ? `${modeOf(replica, own, roles)} (for ${lasting(replica.mode.for_s)})` : own ? "idle" : "";
  const unread = replica.role === "verifier" && !replica.counters;
  const fixed = (value, digits) => (Number.isFinite(value) && replica.counters ? value.toFixed(digits) : "");
  const state = replica.goneS ? `gone for ${lasting(replica.goneS)}`
    : replica.draining ? "draining" : unread ? "metrics not read" : "ok";
  return [
    [replica.id, ""], [replica.address, "mono"], [replica.zone, ""], [replica.model, ""],
    [replica.sessions + (replica.max_sessions ? ` / ${replica.max_sessions}` : ""), "number"],
    [fixed(perS, perS && perS < 10 ? 1 : 0), "number"], [fixed(own?.drafted / own?.turns, 1), "number"],
    [acceptedOf(replica, before, own), "number"],
    [replica.role === "verifier" ? mode : "", ""], [state, state === "ok" ? "" : "warn"],
  ];
}

const seen = new Map(); // replicas, and when each was last there

// Replicas that are there, and those that have gone within the last minute.
function withGone(now) {
  for (const each of now.replicas) seen.set(each.id, { replica: each, atS: now.at_s });
  for (const [id, { atS }] of seen) if (now.at_s - atS > GONE_S) seen.delete(id);
  return [...seen.values()].map(({ replica, atS }) => ({ ...replica, goneS: now.at_s - atS }));
}

function show(now) {
  if (now.at_s === looks.at(-1)?.at_s) return;
  const before = looks[0];
  looks.push(now);
  if (looks.length > SMOOTHED) looks.shift();
  rates.push(before ? between(before, now) : null);
  if (rates.length > WINDOW) rates.shift();
  drawRates();
  say(...stateOf(before, now));
  const [roles, replicas] = [rolesOf(now), withGone(now)];
  if (find("stop").disabled) find("run").disabled = !roles.has("verifier");
  const sorted = TIERS.flatMap((role) => replicas.filter((each) => each.role === role));
  find("replicas").tBodies[0].replaceChildren(...sorted.map((replica) => {
    const row = made("tr", "");
    row.append(...cells(replica, before, now, roles).map(([text, kind]) => made("td", kind, text)));
    return row;
  }));
}

const rolesOf = (now) => new Set(now.replicas.filter((each) => !each.draining).map((each) => each.role));

// Colour, words and notice for the fleet; a verifier that is not plain speaks for it.
function stateOf(before, now) {
  const present = rolesOf(now);
  const named = (word) => [STATES[word][0], word, STATES[word][1]];
  if (!present.has("verifier")) return named("no verifier");
  if (!present.has("drafter")) return named("no drafter");
  const atWork = now.replicas.filter((each) => each.mode && since(before, now, each)?.turns);
  if (!atWork.length) return named("ready");
  const first = atWork.find(({ mode }) => mode.mode !== "plain") ?? atWork[0];
  return [first.mode.mode === "plain" ? "" : "good", modeOf(first, since(before, now, first), present), ""];
}

function say(state, text, notice) {
  write(find("status"), text, state);
  write(find("notice"), notice);
  find("notice").hidden = !notice;
}

async function follow() {
  for (;;) {
    let pauseMs = PAUSE_MS;
    try {
      show(await (await ask("console/figures")).json());
    } catch (error) {
      if (error.status === 401) await keyGiven(error.message);
      else if (error instanceof Refusal) say("bad", "refused", error.message);
      else say("bad", "reconnecting", "The gateway does not answer.");
      if (error.retryAfterS) pauseMs = 1e3 * error.retryAfterS;
    }
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
  }
}

function keyGiven(problem) {
  say("warn", "key needed", "");
  find("key-form").hidden = false;
  find("key-problem").textContent = key && problem;
  find("key").focus();
  return new Promise((resolve) => {
    find("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      key = find("key").value.trim();
      find("key").value = "";
      find("key-form").hidden = true;
      offerModels();
      resolve();
    }, { once: true });
  });
}

// The playground

class Run {
  constructor(article) {
    this.facts = article.querySelector(".facts");
    this.pre = article.querySelector(".text");
  }

  clear(prompt) {
    Object.assign(this, { text: "", record: null, counts: {}, numTokens: 0, firstTokens: 0, firstMs: null, lastMs: null });
    this.startedMs = performance.now();
    this.facts.replaceChildren();
    this.pre.replaceChildren(made("span", "given", prompt));
  }

  take(chunk) {
    const choice = chunk.choices[0];
    const tokens = choice?.token_origins ?? [];
    if (tokens.length) {
      this.lastMs = performance.now();
      this.numTokens += tokens.length;
      if (this.firstMs === null) Object.assign(this, { firstMs: this.lastMs, firstTokens: this.numTokens });
    }
    for (const { text, origin } of tokens) {
      const span = made("span", `token ${origin ?? "plain"}`, text);
      span.title = origin ?? "not told";
      if (origin) this.counts[origin] = (this.counts[origin] ?? 0) + 1;
      this.pre.append(span);
    }
    this.pre.scrollTop = this.pre.scrollHeight;
    this.text += choice?.text ?? "";
    this.record = chunk.metrics?.speculative_decoding ?? this.record;
    this.show();
  }

  // After the first piece, which waits for the prompt.
  get tokensPerS() {
    const decodedS = (this.lastMs - this.firstMs) / 1e3;
    return decodedS > 0 ? (this.numTokens - this.firstTokens) / decodedS : 0;
  }

  show() {
    const facts = [["tokens", this.numTokens]];
    if (this.firstMs) facts.push(["first after", `${Math.round(this.firstMs - this.startedMs)} ms`]);
    if (this.tokensPerS) facts.push(["tokens/s", this.tokensPerS.toFixed(0)]);
    if (this.record) {
      facts.push(["steps", this.record.num_steps]);
      facts.push(["mean acceptance length", this.record.mean_acceptance_length.toFixed(2)]);
    }
    this.facts.replaceChildren(...[...facts, ...Object.entries(this.counts)].map(([name, value]) => {
      const pair = made("div", "");
      pair.append(made("dt", "", name), made("dd", "", value));
      return pair;
    }));
  }
}

function compare(on, off) {
  if (on.text !== off.text) return ["The texts differ, as they may on a GPU and with other rules than “coupled”.", "bad"];
  const same = `Identical: ${on.text.length} characters, every one the same`;
  if (on.record && !on.record.num_spec_steps) return [`${same}. No draft was verified: both runs decoded plainly.`, "good"];
  const fewer = on.record && off.record
    ? `; ${on.record.num_steps} steps of the target instead of ${off.record.num_steps}` : "";
  const faster = on.tokensPerS && off.tokensPerS ? `; ${(on.tokensPerS / off.tokensPerS).toFixed(2)} × the speed` : "";
  return [`${same}${fewer}${faster}.`, "good"];
}

async function play(on, off, signal) {
  const body = {
    prompt: find("prompt").value,
    ...Object.fromEntries(["max_tokens", "temperature", "seed"].map((name) => [name, find(name).valueAsNumber])),
    ...(find("model").value && { model: find("model").value }),
    stream: true,
  };
  off.clear(body.prompt);
  for (const [run, enabled] of [[on, true], [off, false]]) {
    write(find("verdict"), enabled ? "Running with speculation…" : "Running without…", "");
    run.clear(body.prompt);
    const asked = { ...body, speculation: { enabled, token_origins: true } };
    for await (const chunk of events("v1/completions", { body: asked, signal })) run.take(chunk);
  }
  write(find("verdict"), ...compare(on, off));
}

function readyPlayground() {
  const on = new Run(find("with"));
  const off = new Run(find("without"));
  let running = null;
  find("prompt").value = PROMPT;
  find("stop").addEventListener("click", () => running?.abort());
  find("play").addEventListener("submit", async (event) => {
    event.preventDefault();
    running = new AbortController();
    [find("run").disabled, find("stop").disabled] = [true, false];
    try {
      await play(on, off, running.signal);
    } catch (error) {
      write(find("verdict"), ...(running.signal.aborted ? ["Stopped.", ""] : [error.message, "bad"]));
    }
    [find("run").disabled, find("stop").disabled] = [false, true];
  });
}

// Offers the models that the gateway serves, if there is a choice.
async function offerModels() {
  const answer = await ask("v1/models").catch(() => null);
  const names = answer ? (await answer.json()).data.map((model) => model.id) : [];
  find("model").replaceChildren(...names.map((name) => new Option(name, name)));
  find("model-label").hidden = names.length < 2;
}

drawPanels();
readyPlayground();
offerModels();
follow();
