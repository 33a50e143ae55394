// The console: live figures of the fleet, who serves whom, and the playground.

import { panels, repaint } from "./charts.js";
import { drawDiagram, fillTable } from "./fleet.js";
import { offerModels, readyPlayground } from "./playground.js";
import { events, Refusal, useKey } from "./stream.js";

const FIRST_PAUSE_MS = 500;
const LAST_PAUSE_MS = 10000;
// Frames come every second, later where replicas do not answer the gateway; after this nobody is there.
const SILENCE_MS = 40000;
const UNAUTHORIZED = 401;
const element = (id) => document.getElementById(id);
const STATES = {
  drafting: ["good", "drafting", ""],
  "no drafter": ["warn", "no drafter",
    "No drafter is there: verifiers decode plainly, or with guesses of their own. Texts are the same, slower."],
  "no verifier": ["bad", "no verifier", "No verifier is there: requests wait for one, and are refused if none comes."],
};

// Only what has changed is written: screen readers read these aloud.
function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function say(state, text, notice) {
  element("status").dataset.state = state;
  write(element("status"), text);
  write(element("notice"), notice);
  element("notice").hidden = !notice;
}

function summary(frame) {
  const parts = [`${frame.gateway.sessions} session${frame.gateway.sessions === 1 ? "" : "s"} here`];
  if (frame.gateway.tokens_per_s) parts.push(`${Math.round(frame.gateway.tokens_per_s)} tokens/s through this gateway`);
  if (frame.fleet.waiting) parts.push(`${frame.fleet.waiting} waiting`);
  return parts.join(" · ");
}

function show(frame, all) {
  const [state, text, notice] = STATES[frame.status];
  say(state, text, notice);
  element("summary").textContent = summary(frame);
  const atS = Date.now() / 1e3;
  for (const panel of all) panel.add(atS, frame.fleet);
  drawDiagram(element("diagram"), frame);
  fillTable(element("replicas").tBodies[0], frame);
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Follows the figures for ever; asks for a key where one is needed.
async function follow(all) {
  let pauseMs = FIRST_PAUSE_MS;
  for (;;) {
    const patience = new AbortController();
    const silent = () => patience.abort();
    let timer = setTimeout(silent, SILENCE_MS);
    try {
      for await (const frame of events("console/events", { signal: patience.signal })) {
        clearTimeout(timer);
        timer = setTimeout(silent, SILENCE_MS);
        pauseMs = FIRST_PAUSE_MS;
        show(frame, all);
      }
      say("warn", "reconnecting", "");
    } catch (error) {
      if (error instanceof Refusal && error.status === UNAUTHORIZED) await keyGiven(error.message);
      else if (error instanceof Refusal) say("bad", "refused", error.message);
      else say("bad", "reconnecting", "The gateway does not answer.");
      if (error.retryAfterS) pauseMs = 1e3 * error.retryAfterS;
    } finally {
      clearTimeout(timer);
    }
    await pause(pauseMs);
    pauseMs = Math.min(2 * pauseMs, LAST_PAUSE_MS);
  }
}

let wasAsked = false;

function keyGiven(problem) {
  say("warn", "key needed", "");
  element("key-form").hidden = false;
  element("key-problem").textContent = wasAsked ? problem : "";
  wasAsked = true;
  element("key").focus();
  return new Promise((resolve) => {
    element("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      useKey(element("key").value.trim());
      element("key").value = "";
      element("key-form").hidden = true;
      offerModels().catch(() => {});
      resolve();
    }, { once: true });
  });
}

// The reader's choice of colours outlives the page; without one the system's holds.
function readyTheme(all) {
  const names = ["auto", "light", "dark"];
  const button = element("theme");
  const paint = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
    button.setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system has them" : name}`);
    repaint(all);
  };
  // A browser that keeps nothing for pages forgets the choice, and that is all.
  const kept = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  const keep = (name) => { try { localStorage.setItem("theme", name); } catch { /* not kept */ } };
  let current = names.includes(kept()) ? kept() : "auto";
  button.addEventListener("click", () => {
    current = names[(names.indexOf(current) + 1) % names.length];
    keep(current);
    paint(current);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => repaint(all));
  paint(current);
}

const all = panels(element("figures"));
readyTheme(all);
readyPlayground(() => {});
offerModels().catch(() => {});
follow(all);
