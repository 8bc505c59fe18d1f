"""The packed layouts against their definitions, code by code; round trips."""

import minfer
import numpy
import pytest
import torch
from minfer.formats import weight_formats, weight_layout

SHAPES = [(64, 64), (8, 8), (64, 128), (128, 64), (72, 136), (200, 56), (328, 1032)]


def place4(thread, slab, p):
    """Row and column of the code in nibble p of word 4 * thread + slab."""
    return 16 * (thread // 32) + 8 * (p % 2) + (thread % 32) // 4, 16 * slab + 8 * (p // 2 % 2) + 2 * (thread % 4) + p // 4


def place_book(thread, slab, p):
    """Likewise of code books: byte p // 2 holds a pair along k, the even column in its low nibble."""
    return 16 * (thread // 32) + 8 * (p // 2 % 2) + (thread % 32) // 4, 16 * slab + 8 * (p // 4) + 2 * (thread % 4) + p % 2


def packed4(codes, place=place4):
    """numpy uint32 [row blocks, column blocks, 512]: every nibble looked up where the definition says."""
    n, k = codes.shape
    rows, columns = -(-n // 64), -(-k // 64)
    whole = numpy.zeros((rows * 64, columns * 64), dtype=numpy.uint32)
    whole[:n, :k] = codes
    packed = numpy.zeros((rows, columns, 512), dtype=numpy.uint32)
    for thread in range(128):
        for slab in range(4):
            for p in range(8):
                row, column = place(thread, slab, p)
                packed[:, :, 4 * thread + slab] |= whole[row::64, column::64] << numpy.uint32(4 * p)
    return packed


def packed_book(codes):
    return packed4(codes, place_book)


def packed_e2m1(codes):
    """Code i of each 16 bits has its magnitude and its sign in places of their own."""
    plain, packed = packed4(codes), 0
    for half in (0, 16):
        for i, (magnitude, sign) in enumerate([(6, 15), (3, 12), (0, 14), (9, 13)]):
            code = plain >> numpy.uint32(half + 4 * i)
            packed = packed | (code & 7) << numpy.uint32(half + magnitude) | (code >> 3 & 1) << numpy.uint32(half + sign)
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


# The layouts: bits and ``order`` of weight_layout's functions. Beside them the definition.
LAYOUTS = {"int4": (4, "plain"), "book": (4, "book"), "e2m1": (4, "e2m1"), "8-bit": (8, "plain")}
DEFINITIONS = {"int4": packed4, "book": packed_book, "e2m1": packed_e2m1, "8-bit": packed8}
LAYOUT_OF = {"int4": "int4", "nf4": "book", "mxfp4": "e2m1", "nvfp4": "e2m1", "int8": "8-bit", "fp8_e4m3": "8-bit"}


def random_codes(shape, bits):
    return torch.randint(0, 1 << bits, shape).to(torch.uint8)


@pytest.mark.parametrize("name", LAYOUT_OF)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pack_is_the_definition(shape, name):
    bits, _ = LAYOUTS[LAYOUT_OF[name]]
    codes = random_codes(shape, bits)
    packed = minfer.w4a16_pack(codes, w4_format=name) if bits == 4 else minfer.w8a16_pack(codes)
    assert packed.dtype == torch.int32 and packed.is_contiguous()
    assert numpy.array_equal(packed.numpy().view(numpy.uint32), DEFINITIONS[LAYOUT_OF[name]](codes.numpy()))


def test_formats():
    """Which layout a format has; int4's is the packer's default."""
    layouts = {name: (form.bits, form.order) for name, form in weight_formats.FORMATS.items()}
    assert {name: LAYOUTS[layout] for name, layout in LAYOUT_OF.items()}.items() <= layouts.items()
    assert set(layouts.values()) == set(LAYOUTS.values()), "each layout has its definition here"
    codes = random_codes((72, 136), 4)
    assert torch.equal(minfer.w4a16_pack(codes), minfer.w4a16_pack(codes, w4_format="int4"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code_has_a_place_of_its_own(layout):
    """A block of one code that is not zero, for each of its 4096 places; no two share bits."""
    bits, order = LAYOUTS[layout]
    seen = torch.zeros(64 * 64 * bits // 32, dtype=torch.int64)
    for k in range(64):
        codes = torch.zeros(64 * 64, 64, dtype=torch.uint8)  # block i has row i's code of column k
        codes[torch.arange(64) * 65, k] = (1 << bits) - 1
        words = weight_layout.pack(codes, bits, order)[:, 0].long() & 0xFFFFFFFF
        assert words.ne(0).sum(1).eq(1).all() and not (words.sum(0) & seen).any()
        seen += words.sum(0)
    assert seen.eq(0xFFFFFFFF).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 64), (64, 0), (0, 0)], ids=str)
def test_round_trip(shape, layout):
    bits, order = LAYOUTS[layout]
    codes = random_codes(shape, bits)
    packed = weight_layout.pack(codes, bits, order)
    assert packed.shape == weight_layout.packed_shape(*shape, bits) and packed.shape[2] == 128 * bits
    assert torch.equal(weight_layout.unpack(packed, *shape, order), codes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(72, 136), (128, 192)], ids=str)
def test_padding_is_zero(shape, layout):
    bits, order = LAYOUTS[layout]
    rows, columns, _ = weight_layout.packed_shape(*shape, bits)
    largest = (1 << bits) - 1
    packed = weight_layout.pack(torch.full(shape, largest, dtype=torch.uint8), bits, order)
    everything = weight_layout.unpack(packed, 64 * rows, 64 * columns, order)
    assert everything[: shape[0], : shape[1]].eq(largest).all()
    assert int(everything.sum(dtype=torch.int64)) == largest * shape[0] * shape[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(layout):
    bits, order = LAYOUTS[layout]
    base = random_codes((300, 300), bits)
    for view in (base[:128, :192].t(), base[3:131:2, 5:133], base[:64, :256:2], base[:1, :64].expand(64, 64), base[5:77, 7:143]):
        assert torch.equal(weight_layout.pack(view, bits, order), weight_layout.pack(view.contiguous(), bits, order))
    packed = weight_layout.pack(base[:128, :192], bits, order)
    assert torch.equal(weight_layout.unpack(packed.transpose(0, 1).contiguous().transpose(0, 1), 128, 192, order), base[:128, :192])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_input_is_left_alone(layout):
    bits, order = LAYOUTS[layout]
    codes = random_codes((128, 64), bits)
    before = codes.clone()
    packed = weight_layout.pack(codes, bits, order)
    kept = packed.clone()
    weight_layout.unpack(packed, 128, 64, order).zero_()
    assert torch.equal(codes, before) and torch.equal(packed, kept)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_views_without_words(shape, layout):
    """Whatever strides they have, they count as contiguous, but not all can be viewed as bytes."""
    bits, order = LAYOUTS[layout]
    empty = torch.zeros(64, dtype=torch.int32).as_strided((*shape, weight_layout.block_words(bits)), (1, 4, 16))
    unpacked = weight_layout.unpack(empty, 64 * shape[0], 64 * shape[1], order)
    assert unpacked.shape == (64 * shape[0], 64 * shape[1]) and unpacked.dtype == torch.uint8


@pytest.mark.parametrize("order", ["plain", "book", "e2m1"])
def test_high_bits_do_not_leak(order):
    """Where codes are not looked at (CUDA), only their low four bits are packed."""
    codes = torch.randint(0, 256, (64, 128), dtype=torch.uint8)
    assert torch.equal(weight_layout.pack(codes, 4, order), weight_layout.pack(codes & 15, 4, order))
