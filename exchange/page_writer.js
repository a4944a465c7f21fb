// The worker: it reads prompts and samples tokens, as generation/stream.py and sampling.py do, with page_model.js.
//
// It receives { model, weights } once, then { prompt or messages, length, temperature, topP } per text, and
// { stop: true }. It sends { ready }, { reading }, { tokens }, { done } or { problem }.
"use strict";

const NUM_LIKELIEST = 8; // listed per token

// Choose the next token: greedy at temperature 0, else top-p sampling (generation/sampling.py).
function choose(logits, temperature, topP) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  if (temperature === 0) return best;
  const weights = new Float64Array(logits.length);
  let all = 0;
  for (let i = 0; i < logits.length; i++) all += weights[i] = Math.exp((logits[i] - logits[best]) / temperature);
  // Sorting the whole vocabulary would take longer than the model.
  let kept, sum;
  for (let least = 0.01; ; least = least > 1e-12 ? least / 100 : 0) {
    kept = [];
    sum = 0;
    for (let i = 0; i < weights.length; i++) {
      if (weights[i] < least) continue;
      kept.push(i);
      sum += weights[i];
    }
    if (sum >= topP * all || !least) break;
  }
  kept.sort((a, b) => weights[b] - weights[a] || a - b);
  let before = 0, last = 0; // a token is kept if the ones before it sum to less than topP
  for (sum = 0; last < kept.length && (last === 0 || before < topP * all); last++) before = sum += weights[kept[last]];
  let draw = Math.random() * sum;
  for (let i = 0; i < last; i++) if ((draw -= weights[kept[i]]) < 0) return kept[i];
  return kept[last - 1];
}

// Return { probability, rank, likeliest: [[token, probability], ...] } of a chosen token, over the whole vocabulary and
// before temperature and top-p.
function look(logits, unused, token) {
  let largest = -Infinity, sum = 0, rank = 1;
  for (let i = 0; i < logits.length; i++) largest = Math.max(largest, logits[i]);
  for (let i = 0; i < logits.length; i++) sum += Math.exp(logits[i] - largest);
  const share = (i) => Math.exp(logits[i] - largest) / sum, found = [];
  let least = -Infinity; // the lowest logit in a full list
  for (let i = 0; i < logits.length; i++) {
    if ((logits[i] <= least && logits[i] <= logits[token]) || unused.has(i)) continue;
    if (logits[i] > logits[token]) rank++;
    if (logits[i] <= least) continue;
    let place = found.length;
    while (place > 0 && logits[found[place - 1]] < logits[i]) place--;
    found.splice(place, 0, i);
    found.length = Math.min(found.length, NUM_LIKELIEST);
    if (found.length === NUM_LIKELIEST) least = logits[found[NUM_LIKELIEST - 1]];
  }
  return { probability: share(token), rank, likeliest: found.map((i) => [i, share(i)]) };
}

// Let waiting messages, like { stop }, be handled. setTimeout would wait 4 ms each time.
const channel = new MessageChannel();
const breathe = () => new Promise((go) => {
  channel.port1.onmessage = go;
  channel.port2.postMessage(0);
});

class Writer {
  constructor(given, bytes) {
    const { tokenizer, chat, config } = given;
    this.model = new Model(given, bytes);
    this.tokenizer = tokenizer.tokens === undefined ? new Characters(tokenizer) : new BPE(tokenizer);
    this.end = tokenizer.end; // the end-of-text id, or null
    this.ends = new Set(tokenizer.ends); // ids that end a text
    this.unused = new Set(tokenizer.unused); // never chosen
    this.chat = chat;
    this.context = config.max_seq_len;
  }

  // `ChatTemplate.prompt_ids` in common/chat.py: the oldest turns are dropped until the rest fits into `room`.
  chatIds(messages, room) {
    const encode = (turns) => {
      const ids = [this.end];
      let text = "";
      for (const { role, content } of turns) {
        if (role === "user") text += `${this.chat.user} ${content.trim()}\n`;
        else {
          ids.push(...this.tokenizer.encode(text + this.chat.assistant), ...this.tokenizer.encode(` ${content.trim()}`), this.end);
          text = "";
        }
      }
      return [...ids, ...this.tokenizer.encode(text + this.chat.assistant)];
    };
    let ids = encode(messages), left = 0;
    while (ids.length > room && left + 2 < messages.length) ids = encode(messages.slice((left += 2)));
    if (ids.length > this.context)
      throw new Error(`The question has ${ids.length} tokens, but the context is ${this.context}. Ask a shorter one.`);
    return { ids, left };
  }

  promptIds(text) {
    // Strip a trailing space, as generation/completion.py does: BPE words begin with their space.
    const ids = this.tokenizer.encode(this.tokenizer.letters ? text.replace(/(?<=\S) $/, "") : text);
    return ids.length ? ids : [this.end ?? 0];
  }

  label(token) {
    return this.ends.has(token) ? "end of text" : tokenLabel(this.tokenizer.bytes[token]);
  }

  // Read ids; the cache may hold the first of them. Returns the input of the head for the last one.
  async read(ids) {
    let same = 0;
    while (same < ids.length - 1 && ids[same] === this.model.held[same]) same++;
    this.model.held.length = same;
    let hidden = null, seen = performance.now();
    for (let i = same; i < ids.length && !this.stopped; i++) {
      hidden = this.model.read(ids[i]);
      if (performance.now() - seen > 100) {
        postMessage({ reading: (i + 1) / ids.length });
        await breathe();
        seen = performance.now();
      }
    }
    return hidden;
  }

  async write({ prompt, messages, length, temperature, topP }) {
    this.stopped = false;
    const { ids, left } = messages
      ? this.chatIds(messages, this.context - Math.min(length, this.context >> 1))
      : { ids: this.promptIds(prompt), left: 0 };
    const row = [...ids], decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    let hidden = await this.read(row.slice(-this.context)), tokens = [], ended = false, count = 0;
    const started = performance.now();
    let sent = started;
    while (!this.stopped) {
      const logits = this.model.logits(hidden), allowed = logits.slice();
      for (const token of this.unused) allowed[token] = -Infinity;
      const token = choose(allowed, temperature, topP), seen = look(logits, this.unused, token);
      count++;
      ended = this.ends.has(token);
      const text = ended ? "" : decoder.decode(this.tokenizer.bytes[token], { stream: true });
      tokens.push({ ...seen, text, label: this.label(token), likeliest: seen.likeliest.map(([i, p]) => [this.label(i), p]) });
      if (ended || count >= length) break;
      row.push(token);
      if (performance.now() - sent > 40) {
        postMessage({ tokens, count, seconds: (performance.now() - started) / 1000 });
        tokens = [];
        await breathe();
        sent = performance.now();
      }
      // `prefill_full_rows` of generation/stream.py: when the context is full, continue from its second half.
      if (this.model.held.length === this.context) {
        const keep = Math.max(1, this.context >> 1);
        this.model.held = [];
        if (keep > 1) await this.read(row.slice(-keep, -1));
      }
      hidden = this.model.read(token);
    }
    postMessage({ tokens, count, seconds: (performance.now() - started) / 1000 });
    postMessage({ done: ended ? "stopped at the end of the text" : this.stopped ? "stopped" : "token limit reached", left });
  }
}

let writer = null;
onmessage = async ({ data }) => {
  try {
    if (data.stop) {
      if (writer) writer.stopped = true;
    } else if (data.weights) {
      writer = new Writer(data.model, fromBase64(data.weights));
      postMessage({ ready: true });
    } else await writer.write(data);
  } catch (problem) {
    const isMemory = problem instanceof RangeError;
    postMessage({ problem: isMemory ? "This device does not have enough memory for the model." : problem.message });
  }
};
