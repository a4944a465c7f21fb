"""Token ids to text that can be shown while more tokens come."""

from __future__ import annotations

from tokenizer import Tokenizer


class TextStream:
    """Token ids in, text out: only whole characters, and nothing that may be the beginning of a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self.decoder = tokenizer.decoder()
        self.stop = stop
        self.text = ""
        self.shown = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Returns the text that can be shown now."""
        return self.extend(self.decoder.push([token]))

    def finish(self) -> str:
        """The rest, once no more tokens come."""
        return self.extend(self.decoder.flush(), final=True)

    def extend(self, piece: str, final: bool = False) -> str:
        if self.stopped:
            return ""
        # A stop string may begin in text that came before this piece.
        search_from = max(0, len(self.text) - max(map(len, self.stop), default=1) + 1)
        self.text += piece
        hits = [(at + len(word), at) for word in self.stop if (at := self.text.find(word, search_from)) >= 0]
        if hits:  # take the one that ends first, so that the result does not depend on how tokens divide the text
            self.text = self.text[: min(hits)[1]]
            self.stopped = True
        end = len(self.text) if final or self.stopped else len(self.text) - self.held_back()
        fresh, self.shown = self.text[self.shown : end], max(end, self.shown)
        return fresh

    def held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max((n for word in self.stop for n in range(1, len(word)) if self.text.endswith(word[:n])), default=0)
