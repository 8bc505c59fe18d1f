# `make demo` and `make test`, from a bare clone: everything is installed into .venv and built in build/.
#   PYTHON=...                                  interpreter to start from; one with torch >= 2.10 lends it
#   MINFER_CUDA, MINFER_CUDA_ARCHS, MINFER_KERNELS   as in CMakeLists.txt, from the environment or the command line
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

export PYTHON MINFER_CUDA MINFER_CUDA_ARCHS MINFER_KERNELS CUTLASS_DIR MINFER_TORCH_DIR
VENV := .venv
BUILD := build/venv
LOG := build/install.log
# Python tests on the CPU run in a process for each core, those on a GPU in one.
WORKERS := $(if $(wildcard /dev/nvidia0),0,auto)
ONE_THREAD := $(if $(wildcard /dev/nvidia0),,OMP_NUM_THREADS=1)
PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PATH

SOURCES := $(shell find cpp python third_party CMakeLists.txt pyproject.toml README.md LICENSE -type f -not -name '*.pyc' 2>/dev/null)
# A change of options, or a GPU that came or went, builds again.
OPTIONS := $(MINFER_CUDA);$(MINFER_CUDA_ARCHS);$(MINFER_KERNELS);$(CUTLASS_DIR);$(MINFER_TORCH_DIR);$(wildcard /dev/nvidia0)

.PHONY: help demo test environment format clean
help:
	@echo "make demo   build, run every family of operators on real tensors, verify and time them"
	@echo "make test   build, run the C++ and the Python tests"
	@echo "also: make format, make clean"

demo: $(VENV)/minfer-installed
	@$(VENV)/bin/python -m minfer demo

test: $(VENV)/minfer-installed
	@cmake -S . -B $(BUILD) -DMINFER_BUILD_TESTS=ON >$(LOG) 2>&1 && cmake --build $(BUILD) >>$(LOG) 2>&1 \
	  || { tail -n 40 $(LOG); echo "[minfer] building the C++ tests failed: see $(LOG)"; exit 1; }
	@status=0; ctest --test-dir $(BUILD) --output-on-failure --no-tests=error || status=1; \
	  $(ONE_THREAD) $(VENV)/bin/python -m pytest -n $(WORKERS) || status=1; exit $$status

environment:
	@bash third_party/environment.sh

build/options: FORCE
	@mkdir -p build && printf '%s\n' '$(OPTIONS)' | cmp -s - $@ || printf '%s\n' '$(OPTIONS)' >$@
FORCE:

$(VENV)/minfer-installed: $(SOURCES) build/options | environment
	@echo "[minfer] building (MINFER_CUDA=$(or $(MINFER_CUDA),auto); follow it with: tail -f $(LOG))"
	@start=$$SECONDS; $(VENV)/bin/python -m pip install --disable-pip-version-check --no-build-isolation --verbose \
	  --config-settings=build-dir=$(BUILD) '.[test,bench]' >$(LOG) 2>&1 \
	  || { grep -A8 'CMake Error' $(LOG) || tail -n 40 $(LOG); echo "[minfer] the build failed: see $(LOG)"; exit 1; }; \
	  echo "[minfer] built and installed in $$((SECONDS - start)) s"
	@touch $@

format:
	@bash third_party/environment.sh lint
	@git ls-files -co --exclude-standard 'cpp/*' 'bench/*' 'tests/*' | grep -E '\.(h|cuh|cpp|cu)$$' | xargs clang-format -i
	@ruff check --fix && ruff format

clean:
	rm -rf build
