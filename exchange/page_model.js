// The model of the page: the computations of model.py, one token at a time. All weights, and the keys and values of the
// tokens that were read, lie in one WebAssembly memory. The products are page_product.js's.
"use strict";

const BLOCK = 64; // weights that share a scale (page_weights.py)
const WIDE = 16; // float32 rows are as long as a multiple of it (page_product.js)
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

// The float32 of each of the 65,536 numbers of 16 bits.
function halves() {
  return Float32Array.from({ length: 65536 }, (_, bits) => {
    const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  });
}

// erf within 1.5e-7 (Abramowitz & Stegun, 7.1.26), less than float32's rounding of what it is used for.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
  return Math.sign(x) * (1 - tail * Math.exp(-x * x));
}

// model.py's table. A gated one takes the two halves of what enters.
const ACTIVATIONS = {
  gelu: (x) => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  gelu_tanh: (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x))),
  relu2: (x) => (x > 0 ? x * x : 0),
  swiglu: (gate, x) => (gate / (1 + Math.exp(-gate))) * x,
};

class Model {
  // config: a ModelConfig; tensors: [[name, rows, columns], ...] in the order of the bytes; type: "int8" or "f16"
  constructor({ config, tensors, type }, bytes) {
    this.config = config;
    this.type = type;
    this.size = 0;
    const take = (length) => (this.size += up(length, 64)) - up(length, 64);
    const c = config, isRounded = type === "int8";
    this.tensors = {};
    let at = 0; // in `bytes`
    for (const [name, rows, columns] of tensors) {
      const tensor = (this.tensors[name] = { rows, columns, from: at });
      if (rows === 0) { // a vector, in float32
        tensor.at = take(4 * columns);
        at += 4 * columns;
      } else if (isRounded) {
        tensor.wide = up(columns, BLOCK);
        tensor.scales = take((4 * rows * tensor.wide) / BLOCK);
        tensor.at = take(rows * tensor.wide);
        at += (2 * rows * tensor.wide) / BLOCK + rows * tensor.wide;
      } else {
        tensor.wide = up(columns, WIDE);
        tensor.at = take(4 * rows * tensor.wide);
        at += 2 * rows * columns;
      }
    }
    // Keys and queries of a head have rows of `headWide`; values are stored with their columns as rows of `capacity`.
    this.headWide = up(c.head_dim, WIDE);
    this.capacity = up(c.max_seq_len, WIDE);
    const heads = c.num_layers * c.num_kv_heads;
    this.keys = take(4 * heads * this.capacity * this.headWide);
    this.values = take(4 * heads * this.capacity * c.head_dim);
    const widest = up(Math.max(c.embed_dim, c.ff_dim, c.num_heads * c.head_dim), BLOCK);
    const outputs = Math.max(c.vocab_size, 2 * c.ff_dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.embed_dim);
    this.x = take(4 * widest); // what a product reads: float32, or int16
    this.y = take(4 * outputs); // what it writes
    this.query = take(4 * this.headWide);
    this.scores = take(4 * this.capacity);
    this.mixed = take(4 * c.head_dim);
    this.memory = new WebAssembly.Memory({ initial: Math.ceil(this.size / 65536) });
    Object.assign(this, assembleProducts(this.memory));
    this.fill(bytes, isRounded);
    this.held = []; // the tokens in the cache
  }

  floats(at, length) {
    return new Float32Array(this.memory.buffer, at, length);
  }

  fill(bytes, isRounded) {
    const half = halves(), view = new DataView(bytes.buffer);
    for (const tensor of Object.values(this.tensors)) {
      const { rows, columns, wide, from, at } = tensor;
      if (rows === 0) {
        tensor.numbers = this.floats(at, columns);
        for (let i = 0; i < columns; i++) tensor.numbers[i] = view.getFloat32(from + 4 * i, true);
      } else if (isRounded) {
        const blocks = (rows * wide) / BLOCK;
        const scales = (tensor.numbers = this.floats(tensor.scales, blocks));
        for (let i = 0; i < blocks; i++) scales[i] = half[view.getUint16(from + 2 * i, true)];
        const first = from + 2 * blocks;
        tensor.whole = new Int8Array(this.memory.buffer, at, rows * wide);
        tensor.whole.set(new Int8Array(bytes.buffer, first, rows * wide));
      } else {
        tensor.numbers = this.floats(at, rows * wide);
        for (let row = 0, i = from; row < rows; row++)
          for (let column = 0; column < columns; column++, i += 2)
            tensor.numbers[row * wide + column] = half[view.getUint16(i, true)];
      }
    }
  }

  // y += row of the matrix
  addRow(name, row, y) {
    const { columns, wide, numbers, whole } = this.tensors[name];
    for (let i = 0, at = row * wide; i < columns; i++, at++) y[i] += whole ? whole[at] * numbers[(at / BLOCK) | 0] : numbers[at];
  }

  // The matrix times x, plus its bias: a view of `this.y` that the next product overwrites.
  linear(name, x) {
    const { rows, columns, wide, at, scales } = this.tensors[`${name}.weight`];
    const y = this.floats(this.y, rows), bias = this.tensors[`${name}.bias`]?.numbers;
    let scale = 1;
    if (this.type === "int8") {
      // Products of whole numbers are faster. 16 bits round x hundreds of times less than 8 bits round the weights.
      let largest = 0;
      for (let i = 0; i < columns; i++) largest = Math.max(largest, Math.abs(x[i]));
      scale = largest / 32767;
      const whole = new Int16Array(this.memory.buffer, this.x, wide), factor = largest ? 32767 / largest : 0;
      for (let i = 0; i < columns; i++) whole[i] = Math.round(x[i] * factor);
      whole.fill(0, columns);
      this.rounded(at, scales, this.x, this.y, rows, wide);
    } else {
      const padded = this.floats(this.x, wide);
      padded.set(x);
      padded.fill(0, columns);
      this.product(at, this.x, this.y, rows, wide, 4 * wide);
    }
    for (let i = 0; i < rows; i++) y[i] = y[i] * scale + (bias ? bias[i] : 0);
    return y;
  }

  // In place, over x[from .. from + length]; `name` has the gain and the bias, if there are any.
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

  // cos and sin of a position (`rotate` and `scaled` of model.py), which all heads share.
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
    const { num_heads: H, num_kv_heads: K, head_dim: D, qk_norm } = this.config, name = `blocks.${layer}.attention`;
    const { capacity, headWide } = this, group = H / K, seen = position + 1, padded = up(seen, WIDE);
    const qkv = Float32Array.from(this.linear(`${name}.qkv`, x)), y = new Float32Array(H * D);
    for (let head = 0; head < H + K; head++) { // queries, then keys
      if (qk_norm) this.norm(`${name}.${head < H ? "q" : "k"}_norm`, qkv, true, head * D, D);
      if (turn) this.rotate(qkv, head * D, turn);
    }
    const query = this.floats(this.query, headWide), scores = this.floats(this.scores, padded), mixed = this.floats(this.mixed, D);
    for (let k = 0; k < K; k++) {
      const keys = this.keys + 4 * (layer * K + k) * capacity * headWide;
      const values = this.values + 4 * (layer * K + k) * capacity * D;
      this.floats(keys + 4 * position * headWide, headWide).set(qkv.subarray((H + k) * D, (H + k + 1) * D));
      const columns = this.floats(values, capacity * D);
      for (let i = 0; i < D; i++) columns[i * capacity + position] = qkv[(H + K + k) * D + i];
      for (let head = k * group; head < (k + 1) * group; head++) {
        query.set(qkv.subarray(head * D, (head + 1) * D));
        this.product(keys, this.query, this.scores, seen, headWide, 4 * headWide);
        let largest = -Infinity, sum = 0;
        for (let t = 0; t < seen; t++) largest = Math.max(largest, scores[t]);
        for (let t = 0; t < seen; t++) sum += scores[t] = Math.exp((scores[t] - largest) / Math.sqrt(D));
        for (let t = 0; t < seen; t++) scores[t] /= sum;
        scores.fill(0, seen); // what is left in the cache beyond them does not count
        this.product(values, this.scores, this.mixed, D, padded, 4 * capacity);
        y.set(mixed, head * D);
      }
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

  // The next token enters the cache. Returns the input of the head.
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
    const cap = this.config.logit_softcap;
    const logits = this.linear(this.config.tie_embeddings ? "token_embedding" : "head", hidden);
    return cap ? logits.map((each) => cap * Math.tanh(each / cap)) : Float32Array.from(logits);
  }
}
