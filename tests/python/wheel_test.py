"""Installs the wheel as its users get it in a bare environment of every Python from 3.10 on that this machine has,
without compiler or checkout.

    wheel_test.py BUILD          a build folder of Troupe
"""
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest
import zipfile

from make_wheel import PLATFORM, ROOT, SECONDS, SUFFIX, defined_symbols, make_wheel, run

BUILD = pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 else None
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
# Libraries that every Linux of that age has (PEP 600), and the loader.
OF_THE_SYSTEM = re.compile(r"^(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux-x86-64)\.so\.\d+$")


def needed(program):
    """The libraries that a program or a library asks the loader for."""
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", program))


def pythons():
    """One interpreter of each version that this machine has."""
    for version in VERSIONS:
        name = f"python{version}"
        try:
            run(name, "-c", "import venv, ensurepip")
        except (AssertionError, OSError):
            continue
        yield name


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        place = tempfile.TemporaryDirectory()
        cls.addClassCleanup(place.cleanup)
        cls.folder = pathlib.Path(place.name)
        cls.wheel = make_wheel(BUILD, cls.folder)

    def test_it_is_for_every_python_of_its_platform_and_says_what_it_is(self):
        self.assertRegex(self.wheel.name, rf"^troupe_kv-\d+\.\d+\.\d+-py3-none-{PLATFORM}\.whl$")
        names = zipfile.ZipFile(self.wheel).namelist()
        [about] = [name for name in names if name.endswith(".dist-info/METADATA")]
        self.assertIn(b"Provides-Extra: router\n", zipfile.ZipFile(self.wheel).read(about))
        plugins = zipfile.ZipFile(self.wheel).read(about.replace("METADATA", "entry_points.txt")).decode()
        for group, function in (("vllm", "vllm"), ("vllm_omni", "vllm_omni")):
            self.assertIn(f"[{group}.general_plugins]\ntroupe = troupe.plugins:{function}\n", plugins + "\n")
        self.assertIn("[sglang.srt.plugins]\ntroupe = troupe.plugins:sglang\n", plugins + "\n")
        for ending in ("troupe/py.typed", "troupe/_lib/libtroupe.so.0", "troupe/_lib/troupe", ".dist-info/licenses/LICENSE"):
            self.assertEqual(len([name for name in names if name.endswith(ending)]), 1, f"{ending} in {names}")

    @functools.cached_property
    def unpacked(self):
        with zipfile.ZipFile(self.wheel) as wheel:
            wheel.extractall(self.folder / "unpacked")
        return self.folder / "unpacked"

    def install(self, python, home):
        """The programs of a bare environment of this Python with only the wheel."""
        run(python, "-m", "venv", home / "bare")
        run(home / "bare/bin/python", "-m", "pip", "install", "--quiet", "--no-index", self.wheel)
        return home / "bare/bin"

    def run_pair(self, home, **variables):
        """Runs the engines of the examples, whose processes get these variables as well."""
        programs = home / "bare/bin"
        said = " ".join(f"{name}={value}" for name, value in variables.items())
        examples = home / "examples"
        examples.write_text(f'#!/bin/bash\n{said} exec {programs}/python -B {ROOT}/deploy/examples/python/${{2%%-*}}.py "$1"\n')
        examples.chmod(0o755)
        run("bash", ROOT / "tests/docs/run_example", programs / "troupe", examples,
            ROOT / "deploy/examples/engine/deployment.yaml", "unnamed",
            env={"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "PATH": f"{programs}:{os.environ['PATH']}"})

    def test_it_brings_along_what_it_links_under_names_that_nobody_else_has(self):
        unpacked = self.unpacked
        brought = {path.name: path for path in unpacked.rglob("*") if ".so." in path.name}
        for path in (*brought.values(), unpacked / "troupe/_lib/troupe"):
            for library in needed(path):
                if OF_THE_SYSTEM.match(library):
                    continue
                self.assertIn(library, brought, f"of {path.name}")
                self.assertRegex(library, r"-[0-9a-f]{8}\.so", f"of {path.name}")
        # Drivers of devices come from the host.
        self.assertFalse([name for name in brought if re.search("ibverbs|libnl|cuda|hip", name)])

    def test_it_serves_where_there_is_neither_compiler_nor_checkout(self):
        tried = list(pythons())
        self.assertTrue(tried, "there is no Python with venv")
        for python in tried:
            with self.subTest(python=python):
                began = time.monotonic()
                home = self.folder / python
                programs = self.install(python, home)
                bare = {"PATH": str(programs), "HOME": str(home), "XDG_STATE_HOME": str(home / "state")}
                said = run(programs / "troupe", "demo", "--requests", "1", "--max-tokens", "2", "--prompt", "short", cwd=home,
                           env=bare)
                self.assertIn("identical: yes", said)
                refused = subprocess.run([programs / "troupe", "router"], capture_output=True, text=True, timeout=SECONDS,
                                         check=False, env=bare)
                self.assertEqual((refused.returncode, "troupe-kv[router]" in refused.stderr), (1, True), refused.stderr)
                print(f"{python}: {time.monotonic() - began:.1f} s from no environment to the first moved cache")
                self.run_pair(home)

    def test_a_process_may_have_another_release_of_the_libraries_that_it_brings_along(self):
        functions = {name.removesuffix(SUFFIX) for path in self.unpacked.rglob("*.so.*")
                     for name, kind in defined_symbols(path) if name.endswith(SUFFIX) and kind == "STT_FUNC"}
        self.assertGreater(len(functions), 5000)
        source, others = self.folder / "others.s", self.folder / "libothers.so"
        source.write_text('.section .note.GNU-stack, "", @progbits\n.text\ntaken: call abort@PLT\n' + "".join(
            f".globl {name}\n.type {name}, @function\n{name}: jmp taken\n" for name in sorted(functions)))
        run("gcc", "-shared", "-o", others, source)
        home = self.folder / "beside"
        self.install(next(pythons()), home)
        self.run_pair(home, LD_PRELOAD=others)
        with self.assertRaisesRegex(AssertionError, "ended with 134"):  # where the names are those of every release
            self.run_pair(home, LD_PRELOAD=others, TROUPE_LIBRARY=BUILD / "deploy/c/libtroupe.so.0")


if __name__ == "__main__":
    unittest.main()
