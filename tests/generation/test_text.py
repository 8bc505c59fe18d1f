"""Text of tokens as they come."""

from __future__ import annotations

import random

import pytest
from minfer.generation.text import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes; 256 is special."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def stream(text: str, stop=()) -> tuple[list[str], TextStream]:
    out = TextStream(Bytes(), stop)
    return [out.add(byte) for byte in text.encode()], out


def test_characters_come_whole():
    pieces, out = stream("aé漢😀b")
    assert pieces == ["a", "", "é", "", "", "漢", "", "", "", "😀", "b"]
    assert out.whole() == "aé漢😀b" and out.rest() == ""


def test_an_incomplete_end():
    pieces, out = stream("ab")
    out.add(0xE6)
    assert out.rest() == "\ufffd" and out.whole() == "ab\ufffd"


def test_a_stop_string_is_held_back_and_cut_off():
    pieces, out = stream("one STOP", ["STOP", "halt"])
    assert pieces == ["o", "n", "e", " ", "", "", "", ""]
    assert out.stopped == "STOP" and out.whole() == "one " and out.rest() == ""
    assert out.add(65) == ""


def test_what_was_no_stop_string_comes_later():
    pieces, out = stream("ST-STO", ["STOP"])
    assert pieces == ["", "", "ST-", "", "", ""] and out.rest() == "STO"


def test_special_tokens_have_no_text():
    out = TextStream(Bytes())
    assert [out.add(65), out.add(256), out.add(66), out.add(67, special=True)] == ["A", "", "B", ""]
    assert out.whole() == "AB"


@pytest.mark.parametrize("seed", range(30))
def test_pieces_add_up(seed):
    rnd = random.Random(seed)
    text = "".join(rnd.choice("abXY漢é ") for _ in range(40))
    stops = ["".join(rnd.choice("abXY") for _ in range(rnd.randrange(1, 4))) for _ in range(2)]
    pieces, out = stream(text, stops)
    places = [text.find(stop) for stop in stops if stop in text]
    # The text ends where the first stop string that is complete begins.
    ends = min((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)[1] if places else len(text)
    assert "".join(pieces) + out.rest() == out.whole() == text[:ends]
