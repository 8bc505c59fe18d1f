"""Turns the tables of cpp/configs into C++ sources. Standard library only, so that any Python >= 3.10 can run it.

toml.py          reads a table; ConfigError, what everything here raises
row.py           one row of a table: reads its fields, says what cannot be right
formats.py       formats.toml: number types, weight formats, cache formats
format_files.py  formats.h and table.py, the committed files that state them to C++ and to Python
hardware.py      what kernels are budgeted for
kernel.py        one kernel: what every family's has, its registry row
families/        a dataclass for each family: legal rows, shared-memory budget, name, C++ struct, source file
configs.py       cpp/configs/*.toml -> kernels
tuned.py         cpp/configs/tuned/*.csv -> rows that name kernels
shards.py        kernels -> .cu files of at most eight kernels each
registry.py      kernels -> registry.cpp and kernels.json
wgmma_headers.py CUTLASS's headers of WGMMA without the instructions that no kernel uses
generate.py      the command line
"""
