// Text <-> token ids, as in tokenizer_bpe.py and tokenizer.py. tests/exchange/test_page.py compares the ids.
"use strict";

const utf8 = new TextEncoder();
// The pre-tokenizers of learned vocabularies: GPT2_PATTERN and QWEN35_PATTERN in tokenizer_bpe.py.
const WORDS = {
  "gpt-2": String.raw`'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`,
  qwen35:
    String.raw`'(?:[sSſdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}` +
    String.raw`| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
};

// JavaScript's own \s has U+FEFF and lacks U+0085.
function wordPattern(splitting) {
  const pattern = WORDS[splitting]
    .replaceAll(String.raw`\s`, String.raw`\p{White_Space}`)
    .replaceAll(String.raw`\S`, String.raw`\P{White_Space}`);
  return new RegExp(pattern, "gu");
}

// GPT-2's printable letter for each byte (`byte_alphabet`).
function byteLetters() {
  const letters = [];
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const printable = (byte >= 0x21 && byte < 0x7f) || (byte >= 0xa1 && byte < 0xad) || byte >= 0xae;
    letters.push(String.fromCharCode(printable ? byte : next++));
  }
  return letters;
}

class BPE {
  // tokens: in GPT-2's letters, by id, "" for an id without text; nfc: normalize text to NFC first
  constructor({ tokens, splitting, nfc }) {
    this.word = wordPattern(splitting);
    this.nfc = nfc;
    this.letters = byteLetters();
    const bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
    this.bytes = tokens.split(" ").map((token) => Uint8Array.from(token, (letter) => bytes.get(letter)));
    this.ids = new Map(tokens.split(" ").map((token, id) => [token, id]));
    this.ids.delete("");
  }

  encode(text) {
    const ids = [];
    const read = this.nfc ? text.toWellFormed().normalize("NFC") : text.toWellFormed();
    for (const [word] of read.matchAll(this.word)) ids.push(...this.merge(word));
    return ids;
  }

  // Merge the pair with the lowest id until no pair is a token: ids are in the order of the merges.
  merge(word) {
    const parts = Array.from(utf8.encode(word), (byte) => this.letters[byte]);
    const idAt = (i) => this.ids.get(parts[i] + parts[i + 1]) ?? Infinity;
    const joined = parts.slice(1).map((_, i) => idAt(i)); // the id of each pair
    for (;;) {
      let best = -1, lowest = Infinity;
      for (let i = 0; i < joined.length; i++) if (joined[i] < lowest) [best, lowest] = [i, joined[i]];
      if (best < 0) return parts.map((part) => this.ids.get(part));
      parts.splice(best, 2, parts[best] + parts[best + 1]);
      joined.splice(best, 1);
      if (best < joined.length) joined[best] = idAt(best);
      if (best > 0) joined[best - 1] = idAt(best - 1);
    }
  }
}

class Characters {
  constructor({ characters }) {
    this.characters = [...characters];
    this.bytes = this.characters.map((character) => utf8.encode(character));
    this.ids = new Map(this.characters.map((character, id) => [character, id]));
  }

  encode(text) {
    const characters = [...text];
    const unknown = [...new Set(characters.filter((character) => !this.ids.has(character)))];
    if (unknown.length) throw new Error(`The model does not know these characters: ${unknown.slice(0, 5).join(" ")}`);
    return characters.map((character) => this.ids.get(character));
  }
}

// Return a token for display: its text, or hexadecimal bytes if it is a part of a character.
function tokenLabel(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return Array.from(bytes, (byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");
  }
}
