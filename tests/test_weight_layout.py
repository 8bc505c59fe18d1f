"""The packed layout against its definition, nibble by nibble; round trips."""

import minfer
import numpy
import pytest
import torch
from minfer import weight_formats, weight_layout

SHAPES = [(64, 64), (8, 8), (64, 128), (128, 64), (72, 136), (200, 56), (328, 1032)]


def packed_by_definition(codes):
    """numpy uint32 [row blocks, column blocks, 512]: every nibble looked up where the definition says."""
    n, k = codes.shape
    rows, columns = -(-n // 64), -(-k // 64)
    whole = numpy.zeros((rows * 64, columns * 64), dtype=numpy.uint32)
    whole[:n, :k] = codes
    packed = numpy.zeros((rows, columns, 512), dtype=numpy.uint32)
    for thread in range(128):
        for slab in range(4):
            for p in range(8):
                row = 16 * (thread // 32) + 8 * (p % 2) + (thread % 32) // 4
                column = 16 * slab + 8 * (p // 2 % 2) + 2 * (thread % 4) + p // 4
                packed[:, :, 4 * thread + slab] |= whole[row::64, column::64] << numpy.uint32(4 * p)
    return packed


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_is_the_definition(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = minfer.w4a16_pack(codes)
    assert packed.dtype == torch.int32 and packed.is_contiguous()
    assert numpy.array_equal(packed.numpy().view(numpy.uint32), packed_by_definition(codes.numpy()))


@pytest.mark.parametrize("shape", [*SHAPES, (0, 64), (64, 0), (0, 0)], ids=str)
def test_round_trip(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = weight_layout.pack(codes)
    assert packed.shape == weight_layout.packed_shape(*shape)
    assert torch.equal(weight_layout.unpack(packed, *shape), codes)


@pytest.mark.parametrize("shape", [(72, 136), (128, 192)], ids=str)
def test_padding_is_zero(shape):
    rows, columns, _ = weight_layout.packed_shape(*shape)
    everything = weight_layout.unpack(weight_layout.pack(torch.full(shape, 15, dtype=torch.uint8)), 64 * rows, 64 * columns)
    assert everything[: shape[0], : shape[1]].eq(15).all()
    assert int(everything.sum(dtype=torch.int64)) == 15 * shape[0] * shape[1]


def test_views():
    base = torch.randint(0, 16, (300, 300), dtype=torch.uint8)
    for view in (base[:128, :192].t(), base[3:131:2, 5:133], base[:64, :256:2], base[:1, :64].expand(64, 64), base[5:77, 7:143]):
        assert torch.equal(weight_layout.pack(view), weight_layout.pack(view.contiguous()))
    packed = weight_layout.pack(base[:128, :192])
    assert torch.equal(weight_layout.unpack(packed.transpose(0, 1).contiguous().transpose(0, 1), 128, 192), base[:128, :192])


def test_input_is_left_alone():
    codes = torch.randint(0, 16, (128, 64), dtype=torch.uint8)
    before = codes.clone()
    packed = weight_layout.pack(codes)
    kept = packed.clone()
    weight_layout.unpack(packed, 128, 64).zero_()
    assert torch.equal(codes, before) and torch.equal(packed, kept)


def test_high_bits_do_not_leak():
    """Where codes are not looked at (CUDA), only their low four bits are packed."""
    codes = torch.randint(0, 256, (64, 128), dtype=torch.uint8)
    assert torch.equal(weight_layout.pack(codes), weight_layout.pack(codes & 15))


def test_formats():
    assert weight_formats.FORMATS["int4"].decode(torch.arange(16, dtype=torch.uint8)).tolist() == list(range(16))
    assert weight_formats.FORMATS["int4"].zero == 8
