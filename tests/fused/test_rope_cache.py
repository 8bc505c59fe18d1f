"""minfer.rope_cache: its table against plain Python, and its scalings against transformers, where that is installed."""

import math
import types

import minfer
import pytest
import torch
from minfer.formats.rope import rope_frequencies

LONG = {"short_factor": [1.0 + i / 16 for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
SCALINGS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5, "max_position_embeddings": 2048},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn, DeepSeek's": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "yarn, gpt-oss'": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn, a given factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.75, "original_max_position_embeddings": 512},
    "yarn, by lengths": {"rope_type": "yarn", "original_max_position_embeddings": 2048, "max_position_embeddings": 8192},
    "longrope": {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 2048, **LONG},
    "longrope, by lengths": {"type": "longrope", "original_max_position_embeddings": 2048, "max_position_embeddings": 65536, **LONG},
}
LENGTHS = (1, 2048, 2049, 8192)
DIM = 64


def test_table():
    """float64, rounded once; half of the columns are cosines."""
    table = minfer.rope_cache(10000.0, 8, 50)
    assert table.dtype == torch.float32 and table.shape == (50, 8) and table.is_contiguous()
    for position in (0, 1, 17, 49):
        for i in range(4):
            angle = position * 10000.0 ** (-2 * i / 8)
            want = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64).float()
            torch.testing.assert_close(table[position, i::4], want, rtol=2.0**-23, atol=2.0**-40)
    assert minfer.rope_cache(5e5, 64, 0).shape == (0, 64)
    assert minfer.rope_cache(5e5, 64, 3, device="meta").device.type == "meta"
    far = minfer.rope_cache(10000.0, 2, 200001)[-1]
    torch.testing.assert_close(far.double(), torch.tensor([math.cos(200000.0), math.sin(200000.0)]).double(), rtol=2.0**-23, atol=0)


def test_scalings_by_hand():
    plain = rope_frequencies(1e4, DIM)[0]
    assert torch.equal(rope_frequencies(1e4, DIM, SCALINGS["linear"])[0], plain / 4.0)
    for name in ("none", "default"):
        assert torch.equal(rope_frequencies(1e4, DIM, SCALINGS[name])[0], plain)
    # dynamic: as trained up to the length that was trained, and beyond that the last pair is interpolated
    dynamic = SCALINGS["dynamic"]
    assert torch.equal(rope_frequencies(1e4, DIM, dynamic, 2048)[0], plain)
    longer = rope_frequencies(1e4, DIM, dynamic, 4096)[0]
    assert float(longer[0]) == 1.0 and float(plain[-1] / longer[-1]) == pytest.approx(2.5 * 2 - 1.5)
    # llama3 and yarn: high frequencies stay, low ones are divided
    for name in ("llama3", "yarn"):
        scaled = rope_frequencies(1e6, DIM, SCALINGS[name])[0] / rope_frequencies(1e6, DIM)[0]
        assert float(scaled[0]) == 1.0 and float(scaled[-1]) == pytest.approx(1 / SCALINGS[name]["factor"])
        assert bool((scaled.diff() <= 1e-15).all())
    assert rope_frequencies(1e4, DIM, SCALINGS["yarn"])[1] == pytest.approx(0.1 * math.log(4.0) + 1)
    assert rope_frequencies(1e4, DIM, SCALINGS["longrope"])[1] == pytest.approx(math.sqrt(1 + math.log(8) / math.log(2048)))
    table = minfer.rope_cache(1e4, DIM, 3, SCALINGS["yarn, a given factor"])
    assert table[0].tolist() == [0.75] * 32 + [0.0] * 32


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [name for name, scaling in SCALINGS.items() if name not in ("none", "default")])
def test_transformers(name, length):
    """Frequencies within float32's rounding of those that transformers computes in float32, and the same factor of cosines and sines."""
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    scaling = dict(SCALINGS[name])
    kind = scaling.get("rope_type", scaling.get("type"))
    theta = 150000.0
    parameters = {"factor": None, "rope_theta": theta} | scaling
    config = types.SimpleNamespace(
        rope_parameters=parameters,
        standardize_rope_params=lambda: None,
        head_dim=DIM,
        hidden_size=8 * DIM,
        num_attention_heads=8,
        max_position_embeddings=scaling.get("max_position_embeddings", 8192),
    )
    want, factor = functions[kind](config, "cpu", seq_len=length)
    have, own_factor = rope_frequencies(theta, DIM, scaling, length)
    torch.testing.assert_close(have, want.double(), rtol=2.0**-19, atol=0)
    assert own_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dim": 7}, "dim must be an even integer of 2 or more, got 7"),
        ({"dim": 0}, "dim must be an even integer of 2 or more, got 0"),
        ({"length": -1}, "length must be an integer of 0 or more, got -1"),
        ({"length": 2.0}, "length must be an integer of 0 or more, got 2.0"),
        ({"theta": 0.0}, "theta must be positive and not 1, got 0.0"),
        ({"theta": 1}, "theta must be positive and not 1, got 1"),
        ({"theta": math.inf}, "theta must be positive and not 1, got inf"),
        (
            {"scaling": {"rope_type": "mrope"}},
            "scaling must have a rope_type of default, linear, dynamic, llama3, yarn, longrope, got 'mrope'",
        ),
        ({"scaling": {}}, "scaling must have a rope_type of .*, got None"),
        ({"scaling": {"type": "linear"}}, "scaling must have factor"),
        ({"scaling": {"type": "linear", "factor": -2.0}}, r"scaling's factor must be a positive number, got -2.0"),
        ({"scaling": {"type": "linear", "factor": "2"}}, r"scaling's factor must be a positive number, got '2'"),
        ({"scaling": {"type": "dynamic", "factor": 2.0}}, "scaling must have max_position_embeddings or original_max_position_embeddings"),
        ({"scaling": {"type": "yarn", "original_max_position_embeddings": 8}}, "scaling must have factor or max_position_embeddings"),
        ({"scaling": {"type": "llama3", "factor": 8.0}}, "scaling must have original_max_position_embeddings"),
        (
            {"scaling": SCALINGS["llama3"] | {"high_freq_factor": 1.0}},
            "low_freq_factor must be less than high_freq_factor, got 1.0 and 1.0",
        ),
        ({"scaling": SCALINGS["longrope"] | {"short_factor": [1.0]}}, r"short_factor must be a list of dim / 2 = 32 numbers, got \[1.0\]"),
        ({"dim": 2, "scaling": SCALINGS["dynamic"]}, "dim must be more than 2 for dynamic scaling, got 2"),
    ],
    ids=str,
)
def test_errors(arguments, message):
    call = {"theta": 1e4, "dim": DIM, "length": 16} | arguments
    with pytest.raises(ValueError, match=f"^rope_cache: .*{message}"):
        minfer.rope_cache(**call)
