#!/usr/bin/env python3
"""The rooms of actors/, which are its folders, and which rooms may include which. A room includes only rooms of
lower floors, so there is no cycle; files that must work without CAF reach no header of CAF. At the top are the
installed headers, each of which also belongs to a room.

    rooms.py           fails with a line for each include that goes up or reaches CAF, and for each file of no room
    rooms.py --graph   prints the rooms with what each includes, and how often
"""

import argparse
import collections
import pathlib
import re
import sys

ACTORS = pathlib.Path(__file__).resolve().parents[2] / "actors"

# From the lowest floor up: floor, room, whether its files may reach CAF, and its installed headers.
ROOMS = [
    (0, "base", False, "logging"),
    (1, "secrets", False, ""),
    (2, "door", False, "door_security"),
    (3, "discovery", False, "supervisor_begin"),
    (4, "messages", True, "cache_slice cluster_messages engine_types node_info placement report"),
    (5, "transfer", False, ""),
    (5, "membership", False, ""),
    (6, "operations", False, ""),
    (7, "runtime", True, "actor_host_options host_options"),
    (8, "context", True, ""),
    (8, "supervisor", True, ""),
    (8, "client", True, "cluster_client request_carrier leased_name"),
    (9, "link", True, ""),
    (9, "values", True, ""),
    (10, "runner", True, ""),
    (10, "node", True, ""),
    (11, "engine", True, "engine"),
]
MOST_FILES = 35  # per room
ALONE = {"io"}  # a library of its own, which check_includes.cmake covers

FLOOR = {room: floor for floor, room, _, _ in ROOMS}
WITHOUT_CAF = {room for _, room, caf, _ in ROOMS if not caf}
AT_THE_TOP = {f"{name}.hpp": room for _, room, _, headers in ROOMS for name in headers.split()}
INCLUDE = re.compile(r'^\s*#\s*include\s+"troupe/actors/([\w/]+\.hpp)"', re.MULTILINE)


def room_of(file):
    """The room of a path below actors/; None if it is in no room."""
    folder, _, name = file.rpartition("/")
    return (folder if folder in FLOOR else None) if folder else AT_THE_TOP.get(name)


def way_to_caf(file, texts, seen):
    """The chain of headers from this one to one that includes CAF's; empty if there is none."""
    if "#include <caf/" in texts[file]:
        return [file]
    for header in INCLUDE.findall(texts[file]):
        if header in texts and header not in seen:
            seen.add(header)
            if way := way_to_caf(header, texts, seen):
                return [file, *way]
    return []


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--graph", action="store_true")
    options.add_argument("--actors", type=pathlib.Path, default=ACTORS, help="the folder, for the test of this")
    asked = options.parse_args()
    paths = sorted(path for path in asked.actors.rglob("*.[hc]pp") if path.relative_to(asked.actors).parts[0] not in ALONE)
    texts = {str(path.relative_to(asked.actors)): path.read_text(encoding="utf-8") for path in paths}
    wrong = []
    arrows = collections.Counter()
    for file, text in texts.items():
        room = room_of(file)
        if room is None:
            wrong.append(f"{file} is in no room: move it into one, or name it in {pathlib.Path(__file__).name}")
            continue
        for header in INCLUDE.findall(text):
            to = room_of(header)
            if to is None or to == room:
                continue
            arrows[room, to] += 1
            if FLOOR[to] >= FLOOR[room]:
                wrong.append(f"{file} includes {header} ({to}), which is not below it ({room})")
        if room in WITHOUT_CAF and (way := way_to_caf(file, texts, set())):
            wrong.append(f"{file} reaches CAF: {' -> '.join(way)}")
    wrong += [f"{name} is named, and is not there" for name in sorted(AT_THE_TOP) if name not in texts]
    sizes = collections.Counter(room_of(file) for file in texts)
    wrong += [f"{room} has {size} files, more than {MOST_FILES}: divide it" for room, size in sizes.items()
              if room and size > MOST_FILES]
    if asked.graph:
        for floor, room, _, _ in reversed(ROOMS):
            below = ", ".join(f"{to} ({n})" for (of, to), n in sorted(arrows.items()) if of == room)
            print(f"{floor:>2} {room:<11} {sizes[room]:>3} files -> {below or '-'}")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


sys.exit(main())
