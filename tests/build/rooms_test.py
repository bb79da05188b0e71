#!/usr/bin/env python3
"""Checks that each kind of wrong include between rooms of actors/ is reported, in a copy that has it."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
WRONG = {
    "base/phrases.hpp": ('#include "troupe/actors/node_info.hpp"',
                         "base/phrases.hpp includes node_info.hpp (messages), which is not below it (base)"),
    "membership/router.cpp": (
        '#include "troupe/actors/transfer/send_session.hpp"',
        "membership/router.cpp includes transfer/send_session.hpp (transfer), which is not below it (membership)"),
    "operations/source.hpp": ('#include "troupe/actors/messages/local_messages.hpp"',
                              "operations/source.hpp reaches CAF: operations/source.hpp -> messages/local_messages.hpp"),
    "homeless.hpp": ("#pragma once", "homeless.hpp is in no room: move it into one, or name it in rooms.py"),
    "cellar/homeless.cpp": ("", "cellar/homeless.cpp is in no room: move it into one, or name it in rooms.py"),
    **{f"values/file_{number}.cpp": ("", "values has 42 files, more than 35: divide it") for number in range(36)},
}


def lines_of(actors):
    done = subprocess.run([sys.executable, "-B", HERE / "rooms.py", "--actors", actors], stdout=subprocess.PIPE, text=True,
                          check=False)
    return done.returncode, done.stdout.splitlines()


def main():
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "actors"
        shutil.copytree(HERE.parents[1] / "actors", copy)
        code, lines = lines_of(copy)
        if code != 0 or lines:
            sys.exit(f"the copy as it is: {code}, {lines}")
        for name, (line, _) in WRONG.items():
            (copy / name).parent.mkdir(exist_ok=True)
            with open(copy / name, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        (copy / "leased_name.hpp").unlink()
        code, lines = lines_of(copy)
        for expected in [said for _, said in WRONG.values()] + ["leased_name.hpp is named, and is not there"]:
            if not any(line == expected or line.startswith(expected + " ->") for line in lines):
                sys.exit(f"not found: {expected}\nsaid was:\n" + "\n".join(lines))
        if code == 0:
            sys.exit("wrong includes were found, and it says that all is well")


main()
