"""pack_gate_up and its inverse."""

import minfer
import pytest
import torch


def test_blocks_of_eight_rows():
    gate = torch.arange(16).float()[:, None].expand(16, 3)
    packed = minfer.pack_gate_up(gate, gate + 100)
    expected = [*range(0, 8), *range(100, 108), *range(8, 16), *range(108, 116)]
    assert packed.shape == (32, 3) and packed.is_contiguous()
    assert packed[:, 1].tolist() == expected
    assert minfer.pack_gate_up(gate[:, 0], gate[:, 0] + 100).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("shape", [(8, 5), (24, 7), (40,), (0, 4), (8, 0)], ids=str)
def test_round_trip(shape, dtype):
    gate, up = (torch.randint(-100, 100, shape).to(dtype) for _ in range(2))
    packed = minfer.pack_gate_up(gate, up)
    assert packed.shape == (2 * shape[0], *shape[1:]) and packed.dtype == dtype
    back_gate, back_up = minfer.unpack_gate_up(packed)
    assert torch.equal(back_gate, gate) and torch.equal(back_up, up)
    assert back_gate.is_contiguous() and back_up.is_contiguous()


def test_views_and_meta():
    gate, up = torch.randn(5, 16).t(), torch.randn(16, 10)[:, ::2]
    assert torch.equal(minfer.pack_gate_up(gate, up), minfer.pack_gate_up(gate.contiguous(), up.contiguous()))
    assert minfer.pack_gate_up(torch.empty(8, 4, device="meta"), torch.empty(8, 4, device="meta")).shape == (16, 4)


@pytest.mark.parametrize(
    "gate, up, message",
    [
        (torch.zeros(12, 4), torch.zeros(12, 4), "n_half must be a multiple of 8, got 12"),
        (torch.zeros(8, 4), torch.zeros(8, 5), r"up must have gate's shape \[8, 4\], got \[8, 5\]"),
        (torch.zeros(8, 4), torch.zeros(8, 4).half(), "up must have gate's dtype torch.float32, got torch.float16"),
        (torch.zeros(8, 4), torch.zeros(8, 4, device="meta"), "up must be on gate's device cpu, got meta"),
        (torch.zeros(2, 8, 4), torch.zeros(2, 8, 4), r"gate must be \[n_half, k\] or \[n_half\], got \[2, 8, 4\]"),
    ],
)
def test_bad_input(gate, up, message):
    with pytest.raises(ValueError, match=message):
        minfer.pack_gate_up(gate, up)


def test_bad_packed():
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        minfer.unpack_gate_up(torch.zeros(24, 4))
    with pytest.raises(ValueError, match="packed must be"):
        minfer.unpack_gate_up(torch.zeros(2, 16, 4))
