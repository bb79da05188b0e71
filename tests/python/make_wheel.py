"""Builds the wheel as its users get it, from an installed Troupe. The wheel includes the libraries that it links,
under file and symbol names that nothing else in a process has.

    make_wheel.py BUILD FOLDER        makes the wheel of a build folder of Troupe, and prints its path
"""
import os
import pathlib
import re
import subprocess
import sys

from auditwheel.wheeltools import InWheel
from elftools.elf.elffile import ELFFile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = pathlib.Path(sys.executable).parent
PLATFORM = "manylinux_2_35_x86_64"
SECONDS = 300
# The C++ libraries that libtroupe calls. A process may have another release of one of them, and the loader searches
# everything that the process began with before it searches the library beside the caller.
NAMESPACES = re.compile("^_Z.*(3caf|4YAML)")
SUFFIX = ".troupe"  # demanglers show it like the suffix of a clone


def run(*words, **options):
    ended = subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, errors="replace", timeout=SECONDS, check=False,
                           **options)
    if ended.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, words))} ended with {ended.returncode}:\n{ended.stdout[-4000:]}")
    return ended.stdout


def make_wheel(build, folder):
    installed = folder / "installed"
    run("cmake", "--install", build, "--prefix", installed)
    path = f"{TOOLS}:{os.environ['PATH']}"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "built",
        ROOT / "deploy/python", env={**os.environ, "CMAKE_PREFIX_PATH": str(installed), "PATH": path})
    [built] = (folder / "built").glob("*.whl")
    run(TOOLS / "auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", folder / "wheels", built,
        env={**os.environ, "PATH": path})
    [repaired] = (folder / "wheels").glob("*.whl")
    wheel = folder / repaired.name
    rename_symbols(repaired, wheel, folder / "symbols")
    return wheel


def is_program(path):
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def defined_symbols(library):
    """Name and type of the symbols that other libraries may bind."""
    with open(library, "rb") as file:
        for symbol in ELFFile(file).get_section_by_name(".dynsym").iter_symbols():
            if symbol["st_shndx"] != "SHN_UNDEF":
                yield symbol.name, symbol["st_info"]["type"]


def rename_symbols(wheel, renamed, table):
    """Renames the symbols in the libraries and in all that call them."""
    with InWheel(wheel, renamed) as unpacked:
        programs = [path for path in sorted(unpacked.rglob("*")) if is_program(path)]
        names = {name for path in programs for name, _ in defined_symbols(path) if NAMESPACES.match(name)}
        table.write_text("".join(f"{name} {name}{SUFFIX}\n" for name in sorted(names)))
        for path in programs:
            run(TOOLS / "patchelf", "--rename-dynamic-symbols", table, path)


if __name__ == "__main__":
    print(make_wheel(*map(pathlib.Path, sys.argv[1:])))
