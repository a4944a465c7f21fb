// The two matrix-vector products of page_model.js, as WebAssembly with 128-bit SIMD. The module is assembled here, when
// the page starts: plain JavaScript took three times as long or more (docs/benchmarks/page.md).
//
//   product(w, x, y, rows, cols, stride)   y[r] = sum over c of w[r, c] * x[c]. All float32, cols a multiple of 16;
//                                          `stride`: bytes from a row of w to the next
//   rounded(w, s, x, y, rows, cols)        the same of int8 weights and int16 x, cols a multiple of 64; s holds the
//                                          float32 scale of each 64 weights, row after row. The sums of 64 are exact.
//
// w, s, x and y are addresses in the memory, in bytes.
"use strict";

const I32 = 0x7f, V128 = 0x7b;

// Unsigned and signed numbers as WebAssembly writes them (LEB128).
function unsigned(n) {
  return n < 128 ? [n] : [(n & 127) | 128, ...unsigned(n >>> 7)];
}
function signed(n) {
  return n >= -64 && n < 64 ? [n & 127] : [(n & 127) | 128, ...signed(n >> 7)];
}
// A vector: the number of its items, then the items, each of one or several bytes.
const list = (items) => [...unsigned(items.length), ...items.flat(Infinity)];
const section = (number, content) => [number, ...list(content)];
const simd = (number) => [0xfd, ...unsigned(number)];

// Instructions, by their names in the specification. The second number of a load or store is its offset.
const get = (local) => [0x20, local], set = (local) => [0x21, local];
const number = (n) => [0x41, ...signed(n)];
const ADD = 0x6a, SUBTRACT = 0x6b, SHIFT_LEFT = 0x74, LESS = 0x49, END = 0x0b; // of i32; LESS is unsigned
const STORE_F32 = [0x38, 2, 0], LOAD_F32 = [0x2a, 2, 0], ADD_F32 = 0x92;
const load = (offset) => [simd(0), 4, ...unsigned(offset)]; // v128.load
const loadBytes = (offset) => [simd(1), 3, ...unsigned(offset)]; // i16x8.load8x8_s: eight int8 as int16
const ZERO = [simd(12), new Array(16).fill(0)]; // v128.const
const SPLAT_F32 = simd(19), lane = (n) => [simd(31), n]; // f32x4.splat, f32x4.extract_lane
const ADD_I32X4 = simd(174), DOT = simd(186), TO_F32X4 = simd(250); // DOT: i32x4.dot_i16x8_s
const ADD_F32X4 = simd(228), MULTIPLY_F32X4 = simd(230);
const grow = (local, by) => [get(local), by, ADD, set(local)];
// Repeats the body while its last instruction leaves a number other than 0.
const repeat = (...body) => [0x03, 0x40, body, 0x0d, 0, END];
// The sum of the four lanes of a local.
const total = (v) => [get(v), lane(0), get(v), lane(1), ADD_F32, get(v), lane(2), ADD_F32, get(v), lane(3), ADD_F32];

function productCode() {
  const [w, x, y, rows, cols, stride, p, q, end] = [0, 1, 2, 3, 4, 5, 6, 7, 8], sums = [9, 10, 11, 12];
  return [
    repeat(
      sums.map((sum) => [ZERO, set(sum)]),
      [get(w), set(p), get(x), set(q), get(w), get(cols), number(2), SHIFT_LEFT, ADD, set(end)],
      repeat(
        sums.map((sum, i) => [get(sum), get(p), load(16 * i), get(q), load(16 * i), MULTIPLY_F32X4, ADD_F32X4, set(sum)]),
        grow(p, number(64)), grow(q, number(64)), get(p), get(end), LESS,
      ),
      sums.slice(1).map((sum) => [get(sums[0]), get(sum), ADD_F32X4, set(sums[0])]),
      [get(y), total(sums[0]), STORE_F32, grow(w, get(stride)), grow(y, number(4))],
      [get(rows), number(1), SUBTRACT, set(rows), get(rows)],
    ),
  ];
}

function roundedCode() {
  const [w, s, x, y, rows, cols, q, end] = [0, 1, 2, 3, 4, 5, 6, 7], sum = 8, exact = 9;
  return [
    repeat(
      [ZERO, set(sum), get(x), set(q), get(w), get(cols), ADD, set(end)],
      repeat(
        [ZERO, set(exact)],
        [0, 1, 2, 3, 4, 5, 6, 7].map((i) => [get(exact), get(w), loadBytes(8 * i), get(q), load(16 * i), DOT, ADD_I32X4, set(exact)]),
        [get(sum), get(exact), TO_F32X4, get(s), LOAD_F32, SPLAT_F32, MULTIPLY_F32X4, ADD_F32X4, set(sum)],
        grow(w, number(64)), grow(q, number(128)), grow(s, number(4)), get(w), get(end), LESS,
      ),
      [get(y), total(sum), STORE_F32, grow(y, number(4))],
      [get(rows), number(1), SUBTRACT, set(rows), get(rows)],
    ),
  ];
}

// { product, rounded } over a WebAssembly.Memory. Throws where the browser has no SIMD.
function assembleProducts(memory) {
  const name = (text) => list([...text].map((letter) => letter.charCodeAt(0)));
  const six = [0x60, ...list(new Array(6).fill(I32)), 0]; // a function of six numbers that returns none
  // Locals after the parameters: three (two) addresses, then four (two) vectors.
  const bodies = [[3, 4, productCode()], [2, 2, roundedCode()]].map(([addresses, vectors, code]) =>
    list([2, addresses, I32, vectors, V128, code, END].flat(Infinity)));
  const module = [
    [0, 0x61, 0x73, 0x6d, 1, 0, 0, 0],
    section(1, list([six])),
    section(2, list([[name("page"), name("memory"), 2, 0, 1]])),
    section(3, list([0, 0])),
    section(7, list([[name("product"), 0, 0], [name("rounded"), 0, 1]])),
    section(10, list(bodies)),
  ];
  const compiled = new WebAssembly.Module(new Uint8Array(module.flat(Infinity)));
  return new WebAssembly.Instance(compiled, { page: { memory } }).exports;
}
