"""The operator's settings of the router, with bounds for everything that could grow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["GivenEngine", "Limits", "Settings", "SettingsError", "Times", "read_settings", "settings_from"]

#: The roles of engines. `plain`: whole requests; the engine has no connector of Troupe.
ROLES = ("prefill", "decode", "both", "plain")

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+)(KiB|MiB|GiB)")
_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class SettingsError(ValueError):
    """An invalid setting; says which, and what is expected."""


@dataclass(frozen=True)
class GivenEngine:
    """An engine that the settings name.

    Attributes:
        url: of its HTTP server, without a path.
        node: its name in Troupe if a deployment's file names it, so that the supervisor can place requests on it.
        says_tokens: it supports `return_token_ids`, as vLLM does; else its texts are not continued elsewhere.
    """

    url: str
    role: str
    node: str = ""
    says_tokens: bool = True


@dataclass(frozen=True)
class Limits:
    """`running`, `waiting`: requests. `per_engine`: of the running ones, at one engine. `retries`: attempts after the
    first. `connections`: of clients. `body`: bytes of a request; `bodies`: of all in progress."""

    running: int = 512
    waiting: int = 512
    per_engine: int = 256
    retries: int = 2
    connections: int = 4096
    body: int = 32 * 2**20
    bodies: int = 2**30


@dataclass(frozen=True)
class Times:
    """Seconds. `patience`: in the line. `connect`: to an engine. `silence`: of an engine in the middle of a stream,
    after which it is lost. `request`: a whole request. `probe`: between two probes of an engine. `stop`: for running
    requests to end when the router stops."""

    patience: float = 30.0
    connect: float = 5.0
    silence: float = 120.0
    request: float = 600.0
    probe: float = 2.0
    stop: float = 30.0


@dataclass(frozen=True)
class Settings:
    """`supervisor`: HOST:PORT, `deployment`: a file: of the cluster whose engines are found automatically. Neither, and
    no engines: the cluster that engines of this machine form by themselves."""

    host: str = "127.0.0.1"
    port: int = 8080
    engines: tuple[GivenEngine, ...] = ()
    supervisor: str | None = None
    deployment: str | None = None
    limits: Limits = field(default_factory=Limits)
    times: Times = field(default_factory=Times)
    log_level: str = "info"

    @property
    def has_cluster(self) -> bool:
        return self.supervisor is not None or self.deployment is not None or not self.engines


def given_engine(url: object, role: str, node: object = "", says_tokens: object = None, at: str = "") -> GivenEngine:
    """A checked engine. `at`: the name of the setting."""
    if not isinstance(url, str):
        raise SettingsError(f"{at} is {url!r}; give a URL, such as http://10.0.0.1:8000")
    split = urlsplit(url)
    if split.scheme not in ("http", "https") or not split.hostname or split.path not in ("", "/") or split.query:
        raise SettingsError(f"{at} is {url!r}; give http://HOST:PORT without a path")
    try:
        split.port  # noqa: B018  # it is checked when it is read
    except ValueError:
        raise SettingsError(f"{at} is {url!r}; its port is not a number from 0 to 65535") from None
    if "@" in split.netloc:  # logs and metrics name engines by it
        raise SettingsError(f"{at} names a user; give http://HOST:PORT, clients say who they are")
    if role not in ROLES:
        raise SettingsError(f"{at} has role {role!r}; give one of {', '.join(ROLES)}")
    if not isinstance(node, str):
        raise SettingsError(f"{at} has node {node!r}; give the name of a node")
    if says_tokens is None:
        says_tokens = role != "plain"
    if not isinstance(says_tokens, bool):
        raise SettingsError(f"{at} has says_tokens {says_tokens!r}; give true or false")
    return GivenEngine(f"{split.scheme}://{split.netloc}", role, node, says_tokens)


def read_settings(path: str | Path) -> Settings:
    """The settings in a file of YAML. `SettingsError` names the file and the key."""
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as why:
        raise SettingsError(f"{path} cannot be read: {why}") from None
    try:
        return settings_from({} if document is None else document)
    except SettingsError as why:
        raise SettingsError(f"{path}: {why}") from None


def settings_from(document: object) -> Settings:
    """The settings in a parsed document."""
    top = _section(document, "the file", ("listen", "cluster", "engines", "limits", "times", "log_level"))
    listen = _section(top.get("listen", {}), "listen", ("host", "port"))
    cluster = _section(top.get("cluster", {}), "cluster", ("supervisor", "deployment"))
    if len(cluster) == 2:
        raise SettingsError("cluster has supervisor and deployment; give one of them")
    return Settings(
        host=_text(listen.get("host", Settings.host), "listen.host"),
        port=_number(listen.get("port", Settings.port), "listen.port", 0, 65535),
        engines=_engines(top.get("engines", [])),
        supervisor=_optional_text(cluster, "supervisor"),
        deployment=_optional_text(cluster, "deployment"),
        limits=_limits(top.get("limits", {})),
        times=_times(top.get("times", {})),
        log_level=_text(top.get("log_level", Settings.log_level), "log_level"),
    )


def _engines(value: object) -> tuple[GivenEngine, ...]:
    if not isinstance(value, list):
        raise SettingsError(f"engines is {value!r}; give a list")
    found = []
    for place, one in enumerate(value):
        at = f"engines[{place}]"
        entry = _section(one, at, ("url", "role", "node", "says_tokens"))
        for key in ("url", "role"):
            if key not in entry:
                raise SettingsError(f"{at} has no {key}")
        role = _text(entry["role"], f"{at}.role")
        found.append(given_engine(entry["url"], role, entry.get("node", ""), entry.get("says_tokens"), at))
    return tuple(found)


def _limits(value: object) -> Limits:
    given = _section(value, "limits", tuple(one.name for one in fields(Limits)))
    least = {"waiting": 0, "retries": 0, "body": 1024}
    read: dict[str, Callable[[object, str], int]] = {"body": _size, "bodies": _large_size}
    checked = {
        key: read[key](one, f"limits.{key}")
        if key in read
        else _number(one, f"limits.{key}", least.get(key, 1), 1_000_000)
        for key, one in given.items()
    }
    limits = Limits(**checked)
    if limits.bodies < limits.body:
        raise SettingsError("limits.bodies is less than limits.body, the limit for one request")
    return limits


def _times(value: object) -> Times:
    given = _section(value, "times", tuple(one.name for one in fields(Times)))
    return Times(**{key: _duration(one, f"times.{key}") for key, one in given.items()})


def _section(value: object, at: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SettingsError(f"{at} is {value!r}; give keys and values")
    unknown = [str(key) for key in value if key not in keys]
    if unknown:
        raise SettingsError(f"{at} knows no {', '.join(unknown)}; it has {', '.join(keys)}")
    return value


def _text(value: object, at: str) -> str:
    if not isinstance(value, str) or not value:
        raise SettingsError(f"{at} is {value!r}; give a string")
    return value


def _optional_text(section: Mapping[str, Any], key: str) -> str | None:
    return None if section.get(key) is None else _text(section[key], f"cluster.{key}")


def _number(value: object, at: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SettingsError(f"{at} is {value!r}; give a number from {least} to {most}")
    return value


def _duration(value: object, at: str) -> float:
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0.001 <= seconds <= 24 * 3600:
        raise SettingsError(f"{at} is {value!r}; give a time with its unit, such as 500ms or 30s, of at most 24h")
    return seconds


def _size(value: object, at: str, most: int = 1) -> int:
    """`most`: GiB."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    size = int(found[1]) * _SIZES[found[2]] if found else 0
    if not 1024 <= size <= most * 2**30:
        raise SettingsError(f"{at} is {value!r}; give a size with its unit, such as 32MiB, of 1KiB to {most}GiB")
    return size


def _large_size(value: object, at: str) -> int:
    return _size(value, at, 1024)
