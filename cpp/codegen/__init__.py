"""Turns the kernel tables of cpp/configs into C++ sources. Standard library only, so that any Python >= 3.10 can run it.

kernel.py    one compile-time configuration: its fields, its name, its registry row
gemm.py      the GEMM family: which table rows are legal, their shared-memory budget, their C++ struct
configs.py   cpp/configs/*.toml -> kernels
tuned.py     cpp/configs/tuned/*.csv -> rows that name kernels
shards.py    kernels -> .cu files of at most eight kernels each
registry.py  kernels -> registry.cpp and kernels.json
generate.py  the command line
"""
