"""`bench/run xgmi` configures its build without the packages of the actors and without xxhash. Usage:
gpu_bench_test.py RUN FOLDER"""
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

RUN, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])
PACKAGES = ("CAF", "CLI11", "GTest", "OpenSSL", "benchmark", "nlohmann_json", "spdlog", "yaml-cpp")
# CMake looks for GPU compilers in these places as well.
HAS_GPU_COMPILER = any(map(shutil.which, ("hipcc", "nvcc", "/opt/rocm/bin/hipcc", "/usr/local/cuda/bin/nvcc")))


def loaded():
    """bench/run as a module."""
    loader = importlib.machinery.SourceFileLoader("bench_run", RUN)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("bench_run", loader))
    loader.exec_module(module)
    return module


class GpuBench(unittest.TestCase):
    def configured(self, build, hidden=()):
        """What `bench/run xgmi` can build if some packages are missing, and what it reports."""
        tools = build / "hidden.cmake"
        tools.write_text("".join(f"set(CMAKE_DISABLE_FIND_PACKAGE_{package} ON)\n" for package in hidden)
                         + ("set(TROUPE_XXHASH_INCLUDE_DIR OFF)\n" if hidden else ""))
        os.environ["CMAKE_TOOLCHAIN_FILE"] = str(tools)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            targets = loaded().configure_for_gpus(build)
        return targets, said.getvalue()

    def test_without_the_packages_of_the_rest_only_the_gpu_part_is_configured(self):
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as place:
            build = pathlib.Path(place)
            targets, said = self.configured(build, PACKAGES)
            self.assertEqual(targets, ["xgmi_bench"])
            self.assertIn("only the GPU part, without actors: ", said)
            known = subprocess.run(["ninja", "-C", build / "gpu", "-t", "targets", "all"], capture_output=True, text=True,
                                   check=True).stdout
            self.assertNotIn("xgmi_actors_bench", known)
            self.assertNotIn("prefix_index", known)
            if HAS_GPU_COMPILER:
                self.assertIn("xgmi_bench", known)
            # The missing package is named.
            self.assertIn("yaml-cpp", said)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
