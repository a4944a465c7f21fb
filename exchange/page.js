// The form, the settings and the texts, which the demo's script draws (serving/demo_tokens.js, here `showTokens`). The
// model runs in a worker, so the page never freezes.
"use strict";

const byId = (id) => document.getElementById(id);
const given = JSON.parse(byId("model").textContent);
const { name, config, chat, parameters } = given;
const form = byId("form"), text = byId("text"), news = byId("news"), go = byId("go"), stop = byId("stop"), clear = byId("clear");
const turns = []; // the conversation: { role, content }
let answer = null; // the text that is being generated
let begun = false;

// The demo's script reads events as lines of a growing text.
const view = { value: "", update: () => {} };
showTokens(byId("tokens"), view, (_, update) => (view.update = update));
function show(...events) {
  if (events[0].cards) view.value = "";
  view.value += events.map((event) => `${JSON.stringify(event.cards ? event : { card: 0, ...event })}\n`).join("");
  view.update();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = () => document.documentElement.classList.toggle("dark", dark.matches);
dark.addEventListener("change", colour);
colour();

document.title = `${name}: a language model`;
byId("title").textContent = chat ? "A small language model that answers" : "A small language model that continues your text";
const rounded = (count) => (count >= 1e7 ? Math.round(count / 1e6) : (count / 1e6).toPrecision(2));
byId("about").textContent =
  `${name} has ${rounded(parameters)} million parameters` +
  (given.trained_on ? ` and was trained on ${rounded(given.trained_on)} million tokens of ${chat ? "conversations" : "text"}. ` : ". ") +
  "It knows nothing else and makes things up. It runs in your browser: nothing that you type leaves your device.";
text.value = given.example;
byId("length").max = 4 * config.max_seq_len;
byId("length").value = Math.min(200, 4 * config.max_seq_len);
for (const input of form.querySelectorAll("input")) {
  const tell = () => (input.previousElementSibling.textContent = input.value);
  input.addEventListener("input", tell);
  tell();
}
document.querySelector(".considered .caption").textContent = "The model's own probabilities, before temperature and top-p.";
if (chat) {
  byId("asks").textContent = "Question";
  text.rows = 2;
  go.textContent = "Ask";
  clear.hidden = false;
  form.before(byId("tokens").parentElement, news); // a new question goes below the conversation
}

function idle(message) {
  go.disabled = !begun;
  stop.disabled = true;
  clear.disabled = false;
  news.textContent = message;
  answer = null;
}

function fail(problem) {
  if (chat && turns.length % 2) { // a question without an answer
    const { content } = turns.pop();
    text.value = text.value || content;
  }
  if (answer) show({ problem }, { running: false });
  idle(answer ? "" : problem);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (go.disabled) return;
  if (chat && !text.value.trim()) {
    news.textContent = "This is a chat model. Type a question.";
    return;
  }
  const length = +byId("length").value, settings = { length, temperature: +byId("temperature").value, topP: +byId("top_p").value };
  if (!chat || !turns.length) show({ cards: [{}] });
  show({ problem: "" }, { note: "" }, { turn: chat ? "user" : "prompt", text: text.value }, { turn: "model" }, { running: true });
  answer = { text: "", note: "" };
  if (chat) turns.push({ role: "user", content: text.value });
  worker.postMessage(chat ? { messages: turns, ...settings } : { prompt: text.value, ...settings });
  go.disabled = clear.disabled = true;
  stop.disabled = false;
  news.textContent = "";
  if (chat) text.value = "";
});
text.addEventListener("keydown", (event) => {
  // A question is one line, a prompt often several.
  if (event.key !== "Enter" || event.isComposing || event.shiftKey === Boolean(chat)) return;
  event.preventDefault();
  form.requestSubmit();
});
stop.addEventListener("click", () => worker.postMessage({ stop: true }));
clear.addEventListener("click", () => {
  turns.length = 0;
  show({ cards: [] });
  news.textContent = "";
  text.focus();
});

function write({ tokens, count, seconds }) {
  const events = tokens.map(({ text: piece, label, probability, rank, likeliest }) => {
    if (chat && !answer.text) piece = piece.trimStart(); // the label is followed by a space
    answer.text += piece;
    return { token: [piece, label, probability, rank, likeliest] };
  });
  const speed = count > 1 ? `, ${Math.round((count - 1) / Math.max(seconds, 1e-3))} tokens/s` : "";
  answer.note = `${count} token${count === 1 ? "" : "s"}${speed}`;
  show(...events, { note: answer.note });
}

function finish({ done, left }) {
  const dropped = left ? ". The conversation is longer than the context: the oldest turns were dropped." : "";
  show({ note: `${answer.note}, ${done}${dropped}` }, { running: false });
  if (chat && answer.text.trim()) turns.push({ role: "assistant", content: answer.text });
  else if (chat) turns.pop();
  idle("");
}

let worker;
try {
  const code = new Blob([byId("worker").textContent], { type: "text/javascript" });
  worker = new Worker(URL.createObjectURL(code));
  worker.onmessage = ({ data }) => {
    if (data.ready) {
      begun = true;
      idle("");
    } else if (data.problem) fail(data.problem);
    else if (data.reading) news.textContent = `Reading: ${Math.round(100 * data.reading)} %`;
    else if (data.tokens) {
      news.textContent = "";
      write(data);
    } else finish(data);
  };
  worker.onerror = ({ message }) => fail(`The model could not start: ${message}`);
  worker.postMessage({ model: given, weights: byId("weights").textContent });
  byId("weights").remove();
} catch (problem) {
  fail(`The model could not start: ${problem.message}`);
}
