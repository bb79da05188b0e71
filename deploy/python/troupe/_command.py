"""The `troupe` command of the wheel."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Replaces this process by the command, with its own signals and exit status. `troupe router` runs in Python
    itself."""
    if sys.argv[1:2] == ["router"]:
        from troupe.router.__main__ import main as router

        sys.exit(router(sys.argv[2:]))
    program = Path(__file__).parent / "_lib" / "troupe"
    try:
        os.execv(program, ["troupe", *sys.argv[1:]])
    except OSError as why:
        sys.exit(f"troupe: {program} cannot be run: {why}")
