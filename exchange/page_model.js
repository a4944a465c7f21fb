// The model: the computations of model.py, one token at a time.
"use strict";

const BLOCK = 64; // weights per scale: SCALE_BLOCK in page_weights.py
const up = (n, multiple) => Math.ceil(n / multiple) * multiple;

function fromBase64(text) {
  const values = new Uint8Array(128), bytes = new Uint8Array((text.length / 4) * 3);
  [..."ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"].forEach((c, i) => (values[c.charCodeAt(0)] = i));
  for (let i = 0, to = 0; i < text.length; i += 4) {
    const four =
      (values[text.charCodeAt(i)] << 18) | (values[text.charCodeAt(i + 1)] << 12) |
      (values[text.charCodeAt(i + 2)] << 6) | values[text.charCodeAt(i + 3)];
    bytes[to++] = four >> 16;
    bytes[to++] = four >> 8;
    bytes[to++] = four;
  }
  return bytes;
}

// A table of float32 values for all 65,536 float16 bit patterns.
function halves() {
  return Float32Array.from({ length: 65536 }, (_, bits) => {
    const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  });
}

// erf within 1.5e-7 (Abramowitz & Stegun, 7.1.26): below the float32 rounding of GELU.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - tail * Math.exp(-x * x));
}

// ACTIVATIONS of model.py. A gated one takes the two halves of its input.
const ACTIVATIONS = {
  gelu: (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x))),
  swiglu: (gate, x) => (gate / (1 + Math.exp(-gate))) * x,
};

class Model {
  // config: a ModelConfig; tensors: [[name, rows, columns], ...] in the order of the bytes; type: "int8" or "f16"
  constructor({ config, tensors, type }, bytes) {
    this.config = config;
    this.tensors = {};
    const half = halves(), view = new DataView(bytes.buffer);
    let at = 0; // offset into `bytes`
    for (const [name, rows, columns] of tensors) {
      const floats = (length, size, read) => {
        const numbers = new Float32Array(length);
        for (let i = 0; i < length; i++, at += size) numbers[i] = read(at);
        return numbers;
      };
      const fromHalf = (place) => half[view.getUint16(place, true)];
      const tensor = (this.tensors[name] = { rows, columns, wide: columns });
      if (rows === 0) tensor.numbers = floats(columns, 4, (place) => view.getFloat32(place, true)); // a vector
      else if (type === "int8") {
        tensor.wide = up(columns, BLOCK);
        tensor.scales = floats((rows * tensor.wide) / BLOCK, 2, fromHalf);
        tensor.numbers = new Int8Array(bytes.buffer, at, rows * tensor.wide);
        at += rows * tensor.wide;
      } else tensor.numbers = floats(rows * columns, 2, fromHalf);
    }
    const size = config.num_layers * config.num_kv_heads * config.max_seq_len * config.head_dim;
    this.keys = new Float32Array(size); // (layers, heads, tokens, head_dim)
    this.values = new Float32Array(size);
    this.held = []; // the tokens in the cache
  }

  // y += one row of the matrix
  addRow(name, row, y) {
    const { columns, wide, numbers, scales } = this.tensors[name];
    for (let i = 0, at = row * wide; i < columns; i++, at++) y[i] += scales ? numbers[at] * scales[(at / BLOCK) | 0] : numbers[at];
  }

  // Return the matrix times x, plus the bias.
  linear(name, x) {
    const { rows, columns, wide, numbers, scales } = this.tensors[`${name}.weight`];
    const y = new Float32Array(rows), bias = this.tensors[`${name}.bias`]?.numbers;
    const input = new Float32Array(wide); // padded with zeros
    input.set(x.subarray(0, columns));
    for (let row = 0, at = 0, block = 0; row < rows; row++) {
      let sum = bias ? bias[row] : 0;
      if (scales)
        for (let i = 0; i < wide; block++) {
          let a = 0, b = 0, c = 0, d = 0; // four independent sums are faster
          for (const end = i + BLOCK; i < end; i += 4, at += 4) {
            a += numbers[at] * input[i];
            b += numbers[at + 1] * input[i + 1];
            c += numbers[at + 2] * input[i + 2];
            d += numbers[at + 3] * input[i + 3];
          }
          sum += scales[block] * (a + b + c + d);
        }
      else for (let i = 0; i < wide; i++, at++) sum += numbers[at] * input[i];
      y[row] = sum;
    }
    return y;
  }

  // Normalize x[from .. from + length] in place; `name` has the gain and the bias, if any.
  norm(name, x, isRMS, from = 0, length = x.length) {
    const gain = this.tensors[`${name}.weight`]?.numbers, bias = this.tensors[`${name}.bias`]?.numbers;
    let mean = 0, square = 0;
    if (!isRMS) for (let i = 0; i < length; i++) mean += x[from + i] / length;
    for (let i = 0; i < length; i++) square += (x[from + i] - mean) ** 2 / length;
    const factor = 1 / Math.sqrt(square + this.config.norm_eps);
    for (let i = 0; i < length; i++)
      x[from + i] = (x[from + i] - mean) * factor * (gain ? gain[i] : 1) + (bias ? bias[i] : 0);
    return x;
  }

  blockNorm(name, x) {
    return this.norm(name, Float32Array.from(x), this.config.norm === "rmsnorm");
  }

  // cos and sin of a position (`rotate` and `scale_frequencies` in model.py), shared by all heads.
  angles(position) {
    const { head_dim, rope_base, rope_scaling } = this.config, half = head_dim / 2;
    this.frequencies ??= Float32Array.from({ length: half }, (_, i) => {
      const frequency = rope_base ** (-i / half);
      if (!rope_scaling.length) return frequency;
      const [factor, low, high, length] = rope_scaling;
      const stays = Math.min(1, Math.max(0, ((length * frequency) / (2 * Math.PI) - low) / (high - low)));
      return frequency * (stays + (1 - stays) / factor);
    });
    const angles = this.frequencies.map((frequency) => position * frequency);
    return [angles.map(Math.cos), angles.map(Math.sin)];
  }

  rotate(x, from, [cos, sin]) {
    for (let i = 0, half = cos.length; i < half; i++) {
      const a = x[from + i], b = x[from + half + i];
      x[from + i] = a * cos[i] - b * sin[i];
      x[from + half + i] = a * sin[i] + b * cos[i];
    }
  }

  attention(layer, x, position, turn) {
    const { num_heads: H, num_kv_heads: K, head_dim: D, qk_norm, max_seq_len } = this.config, name = `blocks.${layer}.attention`;
    const qkv = this.linear(`${name}.qkv`, x), y = new Float32Array(H * D), scores = new Float32Array(position + 1);
    for (let head = 0; head < H + K; head++) { // queries, then keys
      if (qk_norm) this.norm(`${name}.${head < H ? "q" : "k"}_norm`, qkv, true, head * D, D);
      if (turn) this.rotate(qkv, head * D, turn);
    }
    for (let head = 0; head < H; head++) {
      const k = Math.floor((head * K) / H), cache = (layer * K + k) * max_seq_len * D; // heads of a group share one cache
      const of = (part, i) => qkv.subarray((part + i) * D, (part + i + 1) * D);
      this.keys.set(of(H, k), cache + position * D);
      this.values.set(of(H + K, k), cache + position * D);
      let largest = -Infinity, sum = 0;
      for (let t = 0, at = cache; t <= position; t++) {
        let score = 0;
        for (let i = 0; i < D; i++, at++) score += qkv[head * D + i] * this.keys[at];
        largest = Math.max(largest, (scores[t] = score));
      }
      for (let t = 0; t <= position; t++) sum += scores[t] = Math.exp((scores[t] - largest) / Math.sqrt(D));
      for (let t = 0, at = cache; t <= position; t++)
        for (let i = 0; i < D; i++, at++) y[head * D + i] += (scores[t] / sum) * this.values[at];
    }
    return this.linear(`${name}.out_proj`, y);
  }

  feedForward(layer, x) {
    const { activation, ff_dim: F } = this.config, act = ACTIVATIONS[activation], name = `blocks.${layer}.feed_forward`;
    const inner = this.linear(`${name}.fc1`, x), y = new Float32Array(F);
    if (inner.length === 2 * F) for (let i = 0; i < F; i++) y[i] = act(inner[i], inner[F + i]);
    else for (let i = 0; i < F; i++) y[i] = act(inner[i]);
    return this.linear(`${name}.fc2`, y);
  }

  // Add the next token to the cache. Returns the input of the head.
  read(token) {
    const c = this.config, position = this.held.length, x = new Float32Array(c.embed_dim);
    const add = (y) => { for (let i = 0; i < x.length; i++) x[i] += y[i]; };
    this.addRow("token_embedding.weight", token, x);
    if (c.position === "learned") this.addRow("positional_embedding.weight", position, x);
    if (c.embed_norm) x.set(this.blockNorm("embed_norm", x));
    const turn = c.position === "rope" ? this.angles(position) : null;
    for (let layer = 0; layer < c.num_layers; layer++) {
      add(this.attention(layer, this.blockNorm(`blocks.${layer}.norm1`, x), position, turn));
      add(this.feedForward(layer, this.blockNorm(`blocks.${layer}.norm2`, x)));
    }
    this.held.push(token);
    return this.blockNorm("ln_f", x);
  }

  logits(hidden) {
    return this.linear(this.config.tie_embeddings ? "token_embedding" : "head", hidden);
  }
}
