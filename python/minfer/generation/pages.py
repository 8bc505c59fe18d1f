"""The pages of a cache: who has which, and which hold what prompts share.

A page that is full of a sequence's tokens is known by them and by all tokens before them, so that another sequence which begins in the
same way takes it over (prefix sharing). Nobody writes a full page: shared ones need no copies. A page that nobody has any more keeps its
contents until it is needed for others, the longest unused one first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_Key = tuple[int, tuple[int, ...]]  # the page before, or -1, and the tokens of a page


class OutOfPages(Exception):
    """There are not as many free pages as were asked for."""


class PagePool:
    """Pages 0 to count - 1 of ``page_size`` tokens."""

    def __init__(self, count: int, page_size: int, share_prefixes: bool = True):
        self.count, self.page_size, self.share_prefixes = count, page_size, share_prefixes
        self._users = [0] * count
        self._blank = list(range(count - 1, -1, -1))  # free, and of no known contents
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, of known contents, the longest unused first
        self._known: dict[_Key, int] = {}
        self._key: dict[int, _Key] = {}
        self._next: dict[int, set[int]] = {}  # pages whose key names this one

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return len(self._blank) + len(self._idle)

    def allocate(self, pages: int) -> list[int]:
        """Takes blank pages, or OutOfPages, and none is taken."""
        if pages > self.free:
            raise OutOfPages(f"{pages} pages of {self.page_size} tokens were asked for, and {self.free} of {self.count} are free")
        taken = []
        for _ in range(pages):
            page = self._blank.pop() if self._blank else self._forgotten()
            self._users[page] = 1
            taken.append(page)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Gives pages back, the last one first: beginnings stay known for longest."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._key:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def shared(self, tokens: Sequence[int]) -> list[int]:
        """Takes the pages that hold the beginning of a sequence: whole pages, and at least one token is left to compute."""
        if not self.share_prefixes:
            return []
        found, before = [], -1
        for begin in range(0, (len(tokens) - 1) // self.page_size * self.page_size, self.page_size):
            page = self._known.get((before, tuple(tokens[begin : begin + self.page_size])))
            if page is None:
                break
            found.append(page)
            before = page
        for page in found:
            self._idle.pop(page, None)
            self._users[page] += 1
        return found

    def fill(self, pages: Sequence[int], index: int, tokens: Sequence[int]) -> None:
        """Says that page ``index`` of a sequence's ``pages`` is full of ``tokens``, so that others may find it."""
        if not self.share_prefixes:
            return
        page, before = pages[index], -1 if index == 0 else pages[index - 1]
        key = (before, tuple(tokens))
        # Another page may hold the same already; and what lies behind a page that is not known itself is not found.
        if key in self._known or page in self._key or (before != -1 and before not in self._key):
            return
        self._known[key] = page
        self._key[page] = key
        self._next.setdefault(before, set()).add(page)

    def _forgotten(self) -> int:
        """The longest unused page, whose contents are forgotten, and with it those that follow it."""
        page, _ = self._idle.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        key = self._key.pop(page, None)
        if key is None:
            return
        del self._known[key]
        self._next.get(key[0], set()).discard(page)
        for follower in self._next.pop(page, ()):
            self._forget(follower)
            if follower in self._idle:
                del self._idle[follower]
                self._blank.append(follower)
