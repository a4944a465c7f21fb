// Draw the demo's texts: a card per turn, a colour per token, and a table of the most likely alternatives.
// Gradio calls this with `element` (our template), `props` (props.value: the events of demo_model.py, one per line,
// growing) and `watch`. Text is set by textContent only: model output is never HTML.

const cards = element.querySelector(".cards");
const table = element.querySelector(".considered");
const colours = element.querySelector(".colours input");
const legend = element.querySelector(".legend");
let shown = ""; // the events on the page so far
let active = null; // the token whose table is open

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

function percent(p) {
  if (p >= 0.9995) return "100 %";
  return p >= 0.1 ? `${(100 * p).toFixed(1)} %` : p >= 0.0001 ? `${(100 * p).toPrecision(2)} %` : "< 0.01 %";
}

function visible(label) {
  return label.replaceAll(" ", "\u2423").replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5");
}

// 0: almost certain ... 5: a surprise
function surprise(p) {
  return [0.5, 0.2, 0.05, 0.01, 0.001].filter((bound) => p < bound).length;
}

function tokenNode([text, label, p, rank, likeliest]) {
  const node = make("span", `token surprise-${surprise(p)}`, text);
  if (label === "end of text" && !text) node.classList.add("end");
  if (text.includes("\n")) node.classList.add("newline");
  node.tabIndex = -1;
  node.setAttribute("role", "button");
  node.considered = { label, p, rank, likeliest };
  return node;
}

function cardNode({ title, detail }) {
  const node = make("article", "card");
  const header = make("header");
  header.append(make("h3", "", title), make("span", "detail", detail));
  node.append(header, make("div", "turns"), make("p", "note"), make("p", "problem"));
  node.lastChild.setAttribute("role", "alert");
  return node;
}

// Only append, so that a selection, the focus and an open table stay.
function update() {
  const value = props.value || "";
  if (!value.startsWith(shown)) shown = "";
  if (!shown) cards.replaceChildren();
  for (const line of value.slice(shown.length).split("\n")) if (line) apply(JSON.parse(line));
  shown = value;
  legend.hidden = !cards.querySelector(".token");
  if (active && !active.isConnected) close();
}

function apply(event) {
  if (event.cards) return cards.replaceChildren(...event.cards.map(cardNode));
  const card = cards.children[event.card];
  const turns = card.querySelector(".turns");
  if (event.turn) turns.append(make("div", `turn ${event.turn}`, event.text));
  if (event.token) {
    const node = tokenNode(event.token);
    // Tab reaches one token of a text; arrow keys move from there.
    if (!turns.lastChild.hasChildNodes()) node.tabIndex = 0;
    turns.lastChild.append(node);
  }
  for (const kind of ["note", "problem"]) if (kind in event) card.querySelector(`.${kind}`).textContent = event[kind];
  if ("running" in event) card.classList.toggle("running", event.running);
}

function row(rank, label, p, isChosen) {
  const node = make("tr", isChosen ? "chosen" : "");
  const share = make("td", "share", percent(p));
  const bar = make("span", "bar");
  bar.style.width = `${Math.max(1, 100 * p)}%`;
  share.prepend(bar);
  node.append(make("td", "rank", `${rank}`), make("td", "label", visible(label)), share);
  return node;
}

function open(token) {
  const { label, p, rank, likeliest } = token.considered;
  close();
  active = token;
  token.classList.add("active");
  token.closest(".turn").querySelectorAll('.token[tabindex="0"]').forEach((node) => (node.tabIndex = -1));
  token.tabIndex = 0;
  table.querySelector(".which").textContent = visible(label);
  table.querySelector(".how").textContent = `${percent(p)}, ${rank === 1 ? "most likely" : `choice ${rank.toLocaleString()}`}`;
  const rows = likeliest.map(([text, share], i) => row(i + 1, text, share, i + 1 === rank));
  if (rank > likeliest.length) rows.push(row(rank, label, p, true));
  table.querySelector("tbody").replaceChildren(...rows);
  table.hidden = false;
  const box = element.getBoundingClientRect();
  const lines = token.getClientRects();
  const at = lines.length ? lines[lines.length - 1] : token.getBoundingClientRect();
  table.style.left = `${Math.max(0, Math.min(at.left - box.left, box.width - table.offsetWidth))}px`;
  table.style.top = `${at.bottom - box.top + 6}px`;
  table.scrollIntoView({ block: "nearest" });
}

function close() {
  active?.classList.remove("active");
  active = null;
  table.hidden = true;
}

element.addEventListener("click", (event) => {
  const token = event.target.closest(".turn .token");
  if (token && token !== active) {
    token.focus({ preventScroll: true });
    open(token);
  } else if (!event.target.closest(".considered") || event.target.closest("button")) close();
});

element.addEventListener("keydown", (event) => {
  const token = event.target.closest(".turn .token");
  if (event.key === "Escape" && active) {
    active.focus();
    close();
  } else if (token) {
    const all = [...token.closest(".turn").querySelectorAll(".token")];
    const to = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (to !== undefined) {
      const next = all[Math.max(0, Math.min(all.length - 1, all.indexOf(token) + to))];
      next.focus({ preventScroll: false });
      open(next);
    } else if (event.key === "Enter" || event.key === " ") open(token);
    else return;
  } else return;
  event.preventDefault();
  event.stopPropagation();
});

colours.addEventListener("change", () => element.classList.toggle("plain", !colours.checked));
watch("value", update);
update();
