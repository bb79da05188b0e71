"""The `troupe` command of the wheel."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Becomes the command: signals and the exit status are its own."""
    program = Path(__file__).parent / "_lib" / "troupe"
    try:
        os.execv(program, ["troupe", *sys.argv[1:]])
    except OSError as why:
        sys.exit(f"troupe: {program} cannot be run: {why}")
