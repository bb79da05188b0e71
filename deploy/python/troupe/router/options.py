"""The command line of `troupe router`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from troupe.router.settings import ROLES, Settings, SettingsError, given_engine, read_settings

__all__ = ["settings_of"]

_LEVELS = ("debug", "info", "warning", "error")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="troupe router",
        description="An OpenAI-compatible front end for any number of prefill and decode engines. Without arguments it "
        "serves the engines of this machine that form a cluster by themselves.",
        epilog="Exit codes: 0 stopped; 1 it failed, standard error says why; 2 wrong arguments or settings.",
    )
    made.add_argument("settings", metavar="FILE", nargs="?", help="settings in YAML; the other arguments override them")
    for role, what in (
        ("prefill", "An engine that computes prompts"),
        ("decode", "An engine that writes texts"),
        ("both", "An engine that does either"),
        ("plain", "An engine without Troupe's connector, for whole requests"),
    ):
        made.add_argument(f"--{role}", metavar="URL", action="append", default=[], help=f"{what}; may be repeated")
    made.add_argument("--supervisor", metavar="HOST:PORT", help="supervisor of the cluster whose engines to serve")
    made.add_argument("--deployment", metavar="FILE", help="the deployment of that cluster")
    made.add_argument("--host", help=f"where to listen (default: {Settings.host})")
    made.add_argument("--port", type=int, help=f"0: any free port (default: {Settings.port})")
    made.add_argument("--log-level", choices=_LEVELS, help=f"(default: {Settings.log_level})")
    return made


def settings_of(arguments: Sequence[str]) -> Settings:
    """The settings of a command line. Exits with 2 if it is wrong, or the file that it names."""
    made = parser()
    given = made.parse_args(arguments)
    try:
        settings = Settings() if given.settings is None else read_settings(given.settings)
        engines = [given_engine(url, role, at=f"--{role}") for role in ROLES for url in getattr(given, role)]
        if engines:
            settings = replace(settings, engines=tuple(engines))
        if given.supervisor is not None and given.deployment is not None:
            raise SettingsError("give --supervisor or --deployment, not both")
        if given.supervisor is not None or given.deployment is not None:
            settings = replace(settings, supervisor=given.supervisor, deployment=given.deployment)
        if given.port is not None and not 0 <= given.port <= 65535:
            raise SettingsError(f"--port is {given.port}; give a number from 0 to 65535")
        if settings.log_level not in _LEVELS:
            raise SettingsError(f"log_level is {settings.log_level!r}; give one of {', '.join(_LEVELS)}")
        named = [engine.url for engine in settings.engines]
        if len(set(named)) != len(named):
            raise SettingsError("an engine is named twice; one that prefills and decodes is --both")
    except SettingsError as why:
        made.error(str(why))
    changed = {key: getattr(given, key) for key in ("host", "port", "log_level") if getattr(given, key) is not None}
    return replace(settings, **changed)
