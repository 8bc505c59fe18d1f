"""Generated from cpp/configs/formats.toml: edit that file, then run python cpp/codegen/generate.py --formats."""

# Number types -> torch dtypes.
ELEMENTS = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "e4m3": "float8_e4m3fn",
    "s8": "int8",
    "e8m0": "float8_e8m0fnu",
}

# What codes stand for -> the order of their bits in the packed layout, and each code's value where a table has it.
VALUES = {
    "integer": ("plain", None),
    "nf4": (
        "book",
        (
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        ),
    ),
    "e2m1": (
        "e2m1",
        (
            0.0,
            0.5,
            1.0,
            1.5,
            2.0,
            3.0,
            4.0,
            6.0,
            -0.0,
            -0.5,
            -1.0,
            -1.5,
            -2.0,
            -3.0,
            -4.0,
            -6.0,
        ),
    ),
    "e4m3": ("plain", None),
}

# Formats of quantised weights; None: as many columns of a scale as a call says, or no zero points.
FORMATS = {
    "int4": {
        "bits": 4,
        "values": "integer",
        "scales": "operand",
        "group_size": None,
        "zero": 8.0,
        "usual_group_size": 128,
    },
    "nf4": {
        "bits": 4,
        "values": "nf4",
        "scales": "operand",
        "group_size": None,
        "zero": None,
        "usual_group_size": 64,
    },
    "mxfp4": {
        "bits": 4,
        "values": "e2m1",
        "scales": "e8m0",
        "group_size": 32,
        "zero": None,
        "usual_group_size": 32,
    },
    "nvfp4": {
        "bits": 4,
        "values": "e2m1",
        "scales": "e4m3",
        "group_size": 16,
        "zero": None,
        "usual_group_size": 16,
    },
    "int8": {
        "bits": 8,
        "values": "integer",
        "scales": "operand",
        "group_size": None,
        "zero": 128.0,
        "usual_group_size": -1,
    },
    "fp8_e4m3": {
        "bits": 8,
        "values": "e4m3",
        "scales": "operand",
        "group_size": None,
        "zero": None,
        "usual_group_size": -1,
    },
}

# kv_format -> dtypes of the codes, and what head dimensions are multiples of.
CACHES = {
    "16bit": ((), 8),
    "fp8_e4m3": (("float8_e4m3fn", "uint8"), 16),
    "int8": (("int8",), 16),
    "int4": (("uint8",), 32),
}
