#!/usr/bin/env bash
# environment.sh [lint] [disassembler] [dsl]: makes .venv hold what a build needs, and what the words name, installing only what is missing.
#   PYTHON       interpreter to start from (default: the first Python >= 3.10 on PATH). One that can import torch >= 2.10 lends its torch.
#   MINFER_CUDA  auto, ON or OFF as in CMakeLists.txt; where kernels will be built, CUTLASS's headers and, without an nvcc, NVIDIA's
#                compiler wheels are installed too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
say() { echo "[minfer] $*"; }
die() { echo "[minfer] $*" >&2; exit 1; }

usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
lends_torch() {
  "$1" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))' 2>/dev/null
}

make_venv() {
  "$python" -m venv "$@" $venv >$venv.log 2>&1 && rm $venv.log && return
  cat $venv.log && rm -rf $venv $venv.log
  die "$python cannot make a virtual environment: install its venv package (on Debian and Ubuntu: apt install python3-venv)"
}

if [ ! -x $venv/bin/python ]; then
  python=""
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if usable "$candidate"; then python=$candidate; break; fi
  done
  [ -n "$python" ] || die "no Python >= 3.10 was found${PYTHON:+ at $PYTHON}: set PYTHON to one"
  rm -rf $venv
  if lends_torch "$python"; then
    say "creating $venv over the torch of $("$python" -c 'import sys; print(sys.executable)')"
    make_venv --system-site-packages
    # A venv made from a venv sees the base interpreter's packages only: name the parent's folder too.
    "$python" - "$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'END'
import sys, sysconfig
if sys.prefix != sys.base_prefix:
    folders = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    open(sys.argv[1] + "/parent.pth", "w").write("\n".join(folders) + "\n")
END
  else
    say "creating $venv with $("$python" --version)"
    make_venv
  fi
fi
python=$venv/bin/python

has_torch() {  # without the seconds that importing it takes
  "$python" - <<'END'
import sys
from importlib import metadata
try:
    sys.exit(tuple(map(int, metadata.version("torch").split(".")[:2])) < (2, 10))
except metadata.PackageNotFoundError:
    sys.exit(1)
END
}
missing() {  # missing anywhere|own REQUIREMENT...: those that the environment lacks; own: not counting what it borrows from another
  "$python" - "$@" <<'END'
import re, sys
from importlib import metadata
for requirement in sys.argv[2:]:
    name, wanted = re.match(r"([\w.-]+)(?:==(.*))?", requirement).groups()
    try:
        distribution = metadata.distribution(name)
        have = distribution.version.split("+")[0]
    except metadata.PackageNotFoundError:
        have = None
    if have and sys.argv[1] == "own" and not str(distribution.locate_file("")).startswith(sys.prefix):
        have = None
    if have is None or (wanted and not (have + ".").startswith(wanted.rstrip("*").rstrip(".") + ".")):
        print(requirement)
END
}
pip_install() { "$python" -m pip install -qq --disable-pip-version-check "$@"; }
install() {  # install WHAT [pip options] -- REQUIREMENT...
  local what=$1 options=() wanted
  shift
  while [ "$1" != "--" ]; do options+=("$1"); shift; done
  shift
  mapfile -t wanted < <(missing anywhere "$@")
  [ ${#wanted[@]} -gt 0 ] || return 0
  say "installing $what"
  pip_install "${options[@]}" "${wanted[@]}" || die "pip could not install $what (${wanted[*]})"
}
install_programs() {  # into .venv/bin; without a network, those on PATH will do
  local wanted program
  mapfile -t wanted < <(missing own "$@")
  [ ${#wanted[@]} -gt 0 ] || return 0
  say "installing ${wanted[*]}"
  pip_install --ignore-installed "${wanted[@]}" && return
  for program in "${wanted[@]%%=*}"; do
    "$program" --version >/dev/null 2>&1 || die "pip could not install $program, and none is on PATH"
  done
  say "using those on PATH instead"
}

has_torch || install "torch 2.13.0 (once, the largest download)" -- torch==2.13.0
install "scikit-build-core" -- scikit-build-core
install_programs cmake ninja
"$python" -c 'import tomllib' 2>/dev/null || install "tomli" -- tomli

wants_cuda() {
  case "${MINFER_CUDA:-auto}" in
    [oO][nN] | 1 | [tT][rR][uU][eE] | [yY][eE][sS]) true ;;
    [aA][uU][tT][oO]) nvidia-smi >/dev/null 2>&1 || [ -e /dev/nvidia0 ] ;;
    *) false ;;
  esac
}
if wants_cuda; then
  install "CUTLASS headers" --no-deps -- nvidia-cutlass==4.2.0.0
  if [ -z "${CUDACXX:-}" ] && ! command -v nvcc >/dev/null && [ ! -x "${CUDA_HOME:-/}/bin/nvcc" ] &&
    [ ! -x "${CUDA_PATH:-/}/bin/nvcc" ] && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    # One release for all: the wheels pin each other loosely, and a newer header beside an older compiler does not compile.
    release=13.0
    install "NVIDIA's CUDA $release compiler" -- \
      nvidia-cuda-{nvcc,crt,cccl}==$release.* nvidia-nvvm==$release.* nvidia-cuda-runtime==$release.*
  fi
fi

for word in "$@"; do
  case $word in
    lint) install_programs ruff==0.17.5 clang-format==18.1.8 ;;
    disassembler) install "NVIDIA's disassembler" --no-deps -- nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm ;;
    dsl) install "the CuTe DSL" -- nvidia-cutlass-dsl==4.8.1 ;;
    *) die "environment.sh takes lint, disassembler and dsl, not $word" ;;
  esac
done
