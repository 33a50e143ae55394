// Who serves whom: a diagram of the three tiers and a table of their replicas.

const SVG = "http://www.w3.org/2000/svg";
const TIERS = ["gateway", "verifier", "drafter"];
const MISSING = { verifier: "no verifier", drafter: "no drafter" };
const SHOWN = 6; // replicas of a tier in the diagram; the table has all
const NODE = { width: 140, height: 42, gap: 12, left: [1, 199, 397] };
const WIDTH = 538;
// Where on an edge's way its count stands, by the column of its source: where edges that fan out or cross are apart.
const COUNT_AT = [0.7, 0.3];
const TOP = 24;

function shape(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
const sessions = (count) => `${count} session${count === 1 ? "" : "s"}`;

// Draws the fleet of a frame.
export function drawDiagram(svg, frame) {
  const tiers = TIERS.map((role) => frame.replicas.filter((each) => each.role === role));
  const tallest = Math.max(1, ...tiers.map((tier) => Math.min(SHOWN + 1, tier.length)));
  const height = TOP + tallest * (NODE.height + NODE.gap);
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  const places = new Map();
  const nodes = tiers.flatMap((tier, column) => drawTier(tier, column, height, places, frame));
  const edges = frame.edges.filter((edge) => places.has(edge.from) && places.has(edge.to));
  const drawnEdges = edges.map((edge) => drawEdge(edge, places));
  svg.replaceChildren(...drawnEdges.map((each) => each.line), ...nodes, ...drawnEdges.map((each) => each.count));
  svg.setAttribute("aria-label", edges.length
    ? edges.map((edge) => `${edge.from} to ${edge.to}: ${sessions(edge.sessions)}`).join("; ")
    : "No sessions at the moment");
}

function drawTier(tier, column, height, places, frame) {
  const left = NODE.left[column];
  const role = TIERS[column];
  const parts = [shape("text", { x: left, y: 14, class: "faint" }, `${role}s`)];
  const shown = tier.slice(0, SHOWN);
  const rows = Math.max(1, shown.length + (tier.length > SHOWN));
  const first = TOP + (height - TOP - rows * (NODE.height + NODE.gap)) / 2;
  shown.forEach((replica, row) => {
    const y = first + row * (NODE.height + NODE.gap);
    places.set(replica.id, { left, right: left + NODE.width, y: y + NODE.height / 2, column });
    const own = replica.id === frame.gateway.id && tier.length > 1 ? " (this)" : "";
    parts.push(
      shape("rect", { x: left, y, width: NODE.width, height: NODE.height, rx: 8,
        class: replica.draining ? "node draining" : "node" }),
      shape("text", { x: left + 10, y: y + 18 }, shortened(replica.id, 18)),
      shape("text", { x: left + 10, y: y + 34, class: "faint" }, sessions(replica.sessions) + own),
    );
  });
  if (tier.length > SHOWN || !tier.length) {
    const y = first + shown.length * (NODE.height + NODE.gap) + 26;
    parts.push(shape("text", { x: left + 10, y, class: "faint" },
      tier.length ? `and ${tier.length - SHOWN} more` : MISSING[role] ?? "none"));
  }
  return parts;
}

function drawEdge(edge, places) {
  const from = places.get(edge.from);
  const to = places.get(edge.to);
  const middle = (from.right + to.left) / 2;
  const path = `M${from.right} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.left} ${to.y}`;
  const width = Math.min(12, 1.5 + edge.sessions / 4);
  const at = COUNT_AT[from.column];
  const x = (1 - at) ** 3 * from.right + 3 * at * (1 - at) * middle + at ** 3 * to.left;
  const y = from.y + at * at * (3 - 2 * at) * (to.y - from.y);
  return {
    line: shape("path", { d: path, "stroke-width": width, class: from.column ? "edge drafts" : "edge" }),
    count: shape("text", { x, y: y + 4, class: "count" }, String(edge.sessions)),
  };
}

const fixed = (value, digits) => (typeof value === "number" ? value.toFixed(digits) : "");

function cells(replica) {
  const most = replica.max_sessions ? ` / ${replica.max_sessions}` : "";
  const state = replica.draining ? "draining" : replica.read ? "ok" : "metrics not read";
  const kv = typeof replica.kv_usage === "number" ? `${Math.round(100 * replica.kv_usage)}%` : "";
  return [
    [replica.id, ""], [replica.address, "mono"], [replica.zone, ""], [replica.model, ""], [`${replica.sessions}${most}`, "number"],
    [fixed(replica.tokens_per_s, 0), "number"], [fixed(replica.gamma, 1), "number"],
    [fixed(replica.price, 2), "number"], [fixed(replica.lag_tokens, 0), "number"], [kv, "number"],
    [state, state === "ok" ? "" : "warn"],
  ];
}

// Fills the table with the replicas of a frame, tier by tier.
export function fillTable(body, frame) {
  const sorted = TIERS.flatMap((role) => frame.replicas.filter((each) => each.role === role));
  body.replaceChildren(...sorted.map((replica) => {
    const row = document.createElement("tr");
    row.append(...cells(replica).map(([text, kind]) => {
      const cell = document.createElement("td");
      cell.className = kind;
      cell.textContent = text;
      return cell;
    }));
    return row;
  }));
}
