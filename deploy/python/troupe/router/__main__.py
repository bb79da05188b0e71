"""`troupe router`, and `python3 -m troupe.router`."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Sequence

from troupe.errors import TroupeError
from troupe.router.options import settings_of

# The router's dependencies, by the names that are imported.
_NEEDED = ("aiohttp", "prometheus_client", "yaml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing and not {"-h", "--help"} & set(words):
        said = f"troupe router needs {', '.join(missing)}; install the package with its extra: troupe-kv[router]"
        print(said, file=sys.stderr)
        return 1
    settings = settings_of(words)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s router %(message)s", stream=sys.stderr
    )
    if settings.log_level != "debug":  # aiohttp logs a stack trace for every client that does not speak HTTP
        logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    from troupe.router.service import run

    try:
        asyncio.run(run(settings))
    except (OSError, ValueError, ImportError, TroupeError) as why:
        print(f"troupe router: {why}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
