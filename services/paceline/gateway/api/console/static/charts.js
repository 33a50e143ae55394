// The panels of live figures: a window of the last minutes, drawn by uPlot in the page's own colours.

const WINDOW = 300; // frames
const POSITION_WINDOW = 60; // frames that acceptance by position is taken over

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const number = (digits) => (value) => value.toFixed(digits);
const percent = (value) => `${Math.round(100 * value)}`;
const clock = (atS) => new Date(1e3 * atS).toLocaleTimeString("en-GB");
const integer = (value) => Math.round(value).toLocaleString("en");

// Each series is drawn as it is here; `stacked` ones are given as sums from the bottom up.
const PANELS = {
  tokens: {
    title: "Tokens per second", about: "the target's own, and accepted drafts on top of them",
    series: [
      { label: "accepted drafts", colour: "accepted", fill: "accepted-soft", of: (f) => f.tokens_per_s },
      { label: "target's own", colour: "own", fill: "own-soft",
        of: (f) => (f.tokens_per_s === null ? null : f.tokens_per_s - f.accepted_per_s) },
    ],
    shown: integer, unit: "tokens/s",
  },
  gamma: { title: "Gamma", about: "draft tokens verified per session and step",
    series: [{ colour: "accepted", of: (f) => f.gamma }], shown: number(1), unit: "" },
  price: { title: "Price", about: "least survival worth verifying; 1 turns speculation off", top: 1,
    series: [{ colour: "own", of: (f) => f.price }], shown: number(2), unit: "" },
  batch: { title: "Batch size", about: "decoding sessions of a step",
    series: [{ colour: "own", of: (f) => f.batch_size }], shown: number(1), unit: "sessions" },
  hits: { title: "Hit rate", about: "rounds whose commit was in the drafter's tree already", top: 1,
    series: [{ colour: "accepted", of: (f) => f.hit_rate }], shown: percent, unit: "%",
    marks: (share) => `${percent(share)}%` },
  lag: { title: "Drafter lag", about: "committed tokens that drafters have not caught up with",
    series: [
      { label: "not answered", colour: "bonus", of: (f) => f.unanswered_tokens },
      { label: "not computed", colour: "own", of: (f) => f.uncomputed_tokens },
    ], shown: integer, unit: "tokens" },
  roundtrip: { title: "Draft round trip", about: "from a commit to the first guess that builds on it",
    series: [{ colour: "bonus", of: (f) => (f.round_trip_s === null ? null : 1e3 * f.round_trip_s) }],
    shown: number(1), unit: "ms" },
};
const KEY_CLASS = { accepted: "series-accepted", own: "series-own", bonus: "series-second" };

function head(article, title, about, series) {
  const line = document.createElement("div");
  line.className = "figure-head";
  const heading = document.createElement("h3");
  heading.textContent = title;
  line.append(heading);
  for (const each of series.filter((one) => one.label)) {
    const key = document.createElement("span");
    key.className = `key ${KEY_CLASS[each.colour]}`;
    key.textContent = each.label;
    line.append(key);
  }
  const output = document.createElement("output");
  line.append(output);
  const caption = document.createElement("p");
  caption.className = "figure-about";
  caption.textContent = about;
  const plot = document.createElement("div");
  plot.className = "plot";
  plot.setAttribute("role", "img");
  article.replaceChildren(line, caption, plot);
  return { output, plot };
}

function show(output, text, unit) {
  const small = document.createElement("span");
  small.className = "unit";
  small.textContent = unit;
  output.replaceChildren(text, small);
}

const axis = (more) => ({
  stroke: () => colour("muted"), font: "11px system-ui, sans-serif", gap: 4, ticks: { show: false },
  grid: { stroke: () => colour("grid"), width: 1 }, ...more,
});

function drawn(plot, options, data) {
  const size = () => ({ width: Math.max(80, plot.clientWidth), height: Math.max(60, plot.clientHeight) });
  const chart = new uPlot({ ...size(), legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
    padding: [8, 24, 0, 0], ...options }, data, plot);
  new ResizeObserver(() => chart.setSize(size())).observe(plot);
  return chart;
}

class TimePanel {
  constructor(article, panel) {
    this.panel = panel;
    this.data = [[], ...panel.series.map(() => [])];
    const { output, plot } = head(article, panel.title, panel.about, panel.series);
    this.output = output;
    this.plot = plot;
    const top = (_, __, high) => [0, panel.top ?? Math.max(1, 1.1 * (high ?? 1))];
    this.chart = drawn(plot, {
      scales: { x: { time: true }, y: { range: top } },
      axes: [
        axis({ size: 22, space: 84, values: (_, at) => at.map(clock) }),
        axis({ size: 40, space: 34, ...(panel.marks && { values: (_, at) => at.map(panel.marks) }) }),
      ],
      series: [{}, ...panel.series.map((each) => ({
        stroke: () => colour(each.colour), fill: each.fill && (() => colour(each.fill)), width: 1.6,
        points: { show: false }, spanGaps: false,
      }))],
    }, this.data);
  }

  add(atS, figures) {
    const values = this.panel.series.map((each) => each.of(figures) ?? null);
    [atS, ...values].forEach((value, index) => {
      this.data[index].push(value);
      if (this.data[index].length > WINDOW) this.data[index].shift();
    });
    this.chart.setData(this.data, false);
    // A window that has not filled yet grows from the right, at least a minute wide.
    this.chart.setScale("x", { min: Math.min(this.data[0][0], atS - 60), max: atS });
    const shown = values[0] === null ? "–" : this.panel.shown(values[0]);
    show(this.output, shown, values[0] === null ? "" : this.panel.unit);
    this.plot.setAttribute("aria-label", `${this.panel.title}: ${shown} ${this.panel.unit}`);
  }
}

class PositionPanel {
  constructor(article) {
    this.frames = [];
    const { output, plot } = head(article, "Acceptance by position",
      "share of rounds in which that draft token matched, last minute", []);
    this.output = output;
    this.plot = plot;
    this.chart = drawn(plot, {
      scales: { x: { time: false, range: (u) => [0.4, Math.max(8, u.data[0].length) + 0.6] }, y: { range: [0, 1] } },
      axes: [
        axis({ size: 22, grid: { show: false }, splits: (u) => u.data[0], values: (_, at) => at.map(String) }),
        axis({ size: 40, space: 34, values: (_, at) => at.map((share) => `${percent(share)}%`) }),
      ],
      series: [{}, { stroke: () => colour("accepted"), fill: () => colour("accepted-soft"), width: 1,
        paths: uPlot.paths.bars({ size: [0.62, 46], radius: 0.15 }), points: { show: false } }],
    }, [[], []]);
  }

  add(_, figures) {
    this.frames.push(figures);
    if (this.frames.length > POSITION_WINDOW) this.frames.shift();
    const known = this.frames.filter((frame) => frame.rounds_per_s);
    const rounds = known.reduce((sum, frame) => sum + frame.rounds_per_s, 0);
    const length = Math.min(16, Math.max(0, ...known.map((frame) => frame.accepted_by_position_per_s.length)));
    const shares = Array.from({ length }, (__, at) =>
      known.reduce((sum, frame) => sum + (frame.accepted_by_position_per_s[at] ?? 0), 0) / rounds);
    this.chart.setData([shares.map((__, at) => at + 1), shares]);
    const mean = rounds ? 1 + shares.reduce((sum, share) => sum + share, 0) : null;
    show(this.output, mean === null ? "–" : mean.toFixed(2), mean === null ? "" : "tokens a round");
    this.plot.setAttribute("aria-label", mean === null ? "No drafts yet"
      : `Acceptance by position: ${shares.map((share) => `${percent(share)}%`).join(", ")}`);
  }
}

// Draws the panels of a section; returns them, to be given each frame.
export function panels(section) {
  return [...section.querySelectorAll("[data-chart]")].map((article) => {
    const name = article.dataset.chart;
    return name === "positions" ? new PositionPanel(article) : new TimePanel(article, PANELS[name]);
  });
}

export function repaint(all) {
  for (const panel of all) panel.chart.redraw(false);
}
