"""Command line of the generator; CMake runs it at configuration.

    python cpp/codegen/generate.py --out BUILD/generated --archs "90a;80" [--kernels "gemm_sm90_*"]   write the sources, and with
        --cutlass FOLDER/include shorter copies of some of its headers (wgmma_headers.py)
    python cpp/codegen/generate.py --list [--kernels GLOBS]                                            print kernel names
    python cpp/codegen/generate.py --formats                                          write formats.h and table.py from formats.toml

A file is written only when its text differs, so an unchanged table recompiles nothing; shards that no table asks for are deleted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from codegen import configs, cost_models, format_files, registry, shards, tuned, wgmma_headers
from codegen.formats import project_formats
from codegen.toml import ConfigError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def write_if_different(path: Path, text: str) -> bool:
    """True when the file was (re)written."""
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return True


def generate(folder: Path, out: Path, archs: list[str], globs: str, cutlass_version: str, cutlass: Path | None = None) -> dict:
    """Writes everything below `out` and returns what was done. An empty `archs` is a build without CUDA: nothing is compiled."""
    format_files.check(project_formats())
    kernels = configs.read_tables(folder)
    tables = tuned.read_folder(folder / "tuned", kernels)
    chosen = configs.buildable(configs.select(kernels, globs), archs)
    if archs and not chosen:
        hint = "sm90 kernels need 90a in MINFER_CUDA_ARCHS"
        raise ConfigError(f"MINFER_KERNELS = '{globs}' with MINFER_CUDA_ARCHS = '{';'.join(archs)}' leaves no kernel to compile; {hint}")
    compiled = {kernel.name for kernel in chosen}
    parts = {name: [k for k in members if k.name in compiled] for name, members in shards.assign(kernels).items()}
    parts = {name: members for name, members in parts.items() if members}

    folder_shards = out / "kernels"
    texts = {folder_shards / name: shards.shard_text(members) for name, members in parts.items()}
    texts[out / "registry.cpp"] = registry.registry_text(kernels, compiled, archs, cutlass_version)
    texts[out / "tuned_table.cpp"] = tuned.tuned_text(tables)
    texts[out / "gemm_models.cpp"] = cost_models.models_text(cost_models.read_folder(folder / "models"), kernels)
    texts[out / "kernels.json"] = registry.kernels_json(kernels, compiled)
    texts[out / "shards.cmake"] = shards.write_list(parts, folder_shards.as_posix())
    if cutlass is not None:
        texts |= {out / "cutlass" / name: text for name, text in wgmma_headers.texts(cutlass).items()}
    written = [path for path, text in texts.items() if write_if_different(path, text)]
    stale = [path for path in folder_shards.glob("*.cu") if path not in texts]
    for path in stale:
        path.unlink()
    rows = sum(map(len, tables.values()))
    return dict(kernels=len(kernels), compiled=len(compiled), shards=len(parts), tuned=rows, written=len(written), deleted=len(stale))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=Path, default=CONFIGS, help="folder of the kernel tables (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder to generate into")
    parser.add_argument("--archs", default="", help="';' list of architectures to compile for; empty: a build without CUDA")
    parser.add_argument("--kernels", default="", help="';' list of globs: which kernels to compile (default: all)")
    parser.add_argument("--cutlass-version", default="", help="recorded in the registry")
    parser.add_argument("--cutlass", type=Path, help="CUTLASS's include folder")
    parser.add_argument("--formats", action="store_true", help="write the committed files that state the facts of formats.toml, and stop")
    parser.add_argument("--list", action="store_true", help="print the kernels' names and stop")
    options = parser.parse_args(arguments)
    try:
        if options.formats:
            for path, text in format_files.texts(project_formats()).items():
                print(f"{path.relative_to(format_files.ROOT)}: {'written' if write_if_different(path, text) else 'up to date'}")
            return 0
        if options.list:
            for kernel in configs.select(configs.read_tables(options.configs), options.kernels):
                print(kernel.name)
            return 0
        if options.out is None:
            parser.error("--out is required unless --formats or --list is given")
        archs = configs.split_list(options.archs)
        done = generate(options.configs, options.out, archs, options.kernels, options.cutlass_version, options.cutlass)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    counts = "{kernels} kernels, {compiled} compiled in {shards} shards, {tuned} tuned rows".format(**done)
    print(f"{counts}; {done['written']} files written, {done['deleted']} deleted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
