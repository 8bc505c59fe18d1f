"""The text of tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a tokenizer makes of bytes that are no whole character yet


class TextStream:
    """Text of one request, piece by piece, and the stop string that ends it.

    Pieces add up to the text: a piece is held back while its last character is incomplete, or while it may be the beginning of a stop
    string.

    Args:
      tokenizer: with ``decode(ids, skip_special_tokens=)``.
      stop: strings that end the text, which ends before them.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._begin = self._done = 0  # tokens that context begins at; tokens whose text is known
        self._text, self._given = "", 0
        self.stopped: str | None = None

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[begin:end], skip_special_tokens=True)

    def add(self, token: int, special: bool = False) -> str:
        """The next token, and what it adds. special: it ends the text, and is no part of it."""
        if special or self.stopped is not None:
            return ""
        self._tokens.append(token)
        # A token's text depends on those in front of it (spaces): it is what decoding some of these with it adds.
        before, now = self._decode(self._begin, self._done), self._decode(self._begin, len(self._tokens))
        if now.endswith(_INCOMPLETE) or len(now) < len(before):
            return ""
        self._text += now[len(before) :]
        self._begin, self._done = self._done, len(self._tokens)
        self._look_for_stop(len(now) - len(before))
        return self._piece(len(self._text) - self._held())

    def _look_for_stop(self, added: int) -> None:
        found = []
        for stop in self._stop:
            place = self._text.find(stop, max(len(self._text) - added - len(stop) + 1, 0))
            if place >= 0:
                found.append((place, -len(stop), stop))
        if found:
            place, _, self.stopped = min(found)
            self._text = self._text[:place]

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        if self.stopped is not None:
            return 0
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _piece(self, end: int) -> str:
        piece = self._text[self._given : end]
        self._given = max(end, self._given)
        return piece

    def _complete(self) -> None:
        """What an incomplete character is at the end is what the tokenizer says."""
        if self.stopped is None and self._done < len(self._tokens):
            before, now = self._decode(self._begin, self._done), self._decode(self._begin, len(self._tokens))
            self._text += now[len(before) :]
            self._done = len(self._tokens)

    def rest(self) -> str:
        """What was held back, once nothing follows."""
        self._complete()
        return self._piece(len(self._text))

    def whole(self) -> str:
        """All of the text, once nothing follows."""
        self._complete()
        return self._text
