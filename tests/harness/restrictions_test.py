"""Checks that a restriction, the first argument, is in force in a place made for it, and not elsewhere: a process
tries there what it should not be able to do. The second argument is the folder of the programs that make it."""
import pathlib
import sys
import tempfile

import restrictions
from build import ROOT

SKIPPED = 77


def main(name, tools):
    if not restrictions.probe(name, restrictions.Place()):
        print(f"{name} is in force on this machine anyway")
        return SKIPPED
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="planted-", dir=ROOT / "build") as folder:
        try:
            with restrictions.restricted(name, pathlib.Path(tools), pathlib.Path(folder)) as place:
                found = restrictions.probe(name, place)
        except restrictions.CannotBeMade as reason:
            print(f"no place for {name} can be made here: {reason}")
            return SKIPPED
    print(found or f"{name} is in force")
    return 1 if found else 0


sys.exit(main(*sys.argv[1:]))
