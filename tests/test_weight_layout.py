"""The packed layouts against their definitions, code by code; round trips."""

import minfer
import numpy
import pytest
import torch
from minfer import weight_layout

SHAPES = [(64, 64), (8, 8), (64, 128), (128, 64), (72, 136), (200, 56), (328, 1032)]


def packed4(codes):
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


def packed8(codes):
    """numpy uint32 [row blocks, column blocks, 1024]: every code put where the definition says."""
    n, k = codes.shape
    packed = numpy.zeros((-(-n // 64), -(-k // 64), 1024), dtype=numpy.uint32)
    row, column = numpy.meshgrid(numpy.arange(n), numpy.arange(k), indexing="ij")
    i, j = row % 64, column % 64
    thread = i // 16 * 32 + i % 8 * 4 + j % 8 // 2
    word = j // 16 // 2 * 512 + 4 * thread + j // 16 % 2 * 2 + j // 8 % 2
    shift = 8 * (i // 8 % 2 + 2 * (j % 2))
    numpy.bitwise_or.at(packed, (row // 64, column // 64, word), codes.astype(numpy.uint32) << shift.astype(numpy.uint32))
    return packed


BITS = {4: (minfer.w4a16_pack, packed4), 8: (minfer.w8a16_pack, packed8)}


def random_codes(shape, bits):
    return torch.randint(0, 1 << bits, shape).to(torch.uint8)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_is_the_definition(shape, bits):
    pack, by_definition = BITS[bits]
    codes = random_codes(shape, bits)
    packed = pack(codes)
    assert packed.dtype == torch.int32 and packed.is_contiguous()
    assert numpy.array_equal(packed.numpy().view(numpy.uint32), by_definition(codes.numpy()))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 64), (64, 0), (0, 0)], ids=str)
def test_round_trip(shape, bits):
    codes = random_codes(shape, bits)
    packed = weight_layout.pack(codes, bits)
    assert packed.shape == weight_layout.packed_shape(*shape, bits) and packed.shape[2] == 128 * bits
    assert torch.equal(weight_layout.unpack(packed, *shape), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(72, 136), (128, 192)], ids=str)
def test_padding_is_zero(shape, bits):
    rows, columns, _ = weight_layout.packed_shape(*shape, bits)
    largest = (1 << bits) - 1
    everything = weight_layout.unpack(weight_layout.pack(torch.full(shape, largest, dtype=torch.uint8), bits), 64 * rows, 64 * columns)
    assert everything[: shape[0], : shape[1]].eq(largest).all()
    assert int(everything.sum(dtype=torch.int64)) == largest * shape[0] * shape[1]


@pytest.mark.parametrize("bits", BITS)
def test_views(bits):
    base = random_codes((300, 300), bits)
    for view in (base[:128, :192].t(), base[3:131:2, 5:133], base[:64, :256:2], base[:1, :64].expand(64, 64), base[5:77, 7:143]):
        assert torch.equal(weight_layout.pack(view, bits), weight_layout.pack(view.contiguous(), bits))
    packed = weight_layout.pack(base[:128, :192], bits)
    assert torch.equal(weight_layout.unpack(packed.transpose(0, 1).contiguous().transpose(0, 1), 128, 192), base[:128, :192])


@pytest.mark.parametrize("bits", BITS)
def test_input_is_left_alone(bits):
    codes = random_codes((128, 64), bits)
    before = codes.clone()
    packed = weight_layout.pack(codes, bits)
    kept = packed.clone()
    weight_layout.unpack(packed, 128, 64).zero_()
    assert torch.equal(codes, before) and torch.equal(packed, kept)


def test_high_bits_do_not_leak():
    """Where codes are not looked at (CUDA), only their low four bits are packed."""
    codes = torch.randint(0, 256, (64, 128), dtype=torch.uint8)
    assert torch.equal(weight_layout.pack(codes), weight_layout.pack(codes & 15))
