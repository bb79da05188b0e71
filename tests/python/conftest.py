"""Shared by the tests: a supervisor of their own, engines with small caches, other processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import troupe

# Generous, since a machine may be busy. No result depends on how long something takes.
PATIENCE = 120.0

TOKENS = 10
SENT = [5, 0, 2]
RECEIVED = [1, 7, 3]


def _head_of_deployment(port: int) -> str:
    return f"""
cluster: python
supervisor:
  {{host: 127.0.0.1, port: {port}, heartbeat_interval: 100ms, heartbeat_timeout: 10min, state_file: none}}
security: {{mode: none}}
stages:"""


# No peer is given up because the machine is busy.
_PATIENT = "transport: {peer_silence: 1min, connect_timeout: 1min}"


def deployment(port: int) -> str:
    return f"""{_head_of_deployment(port)}
  - {{name: prefill, {_PATIENT}, role: prefill, engine: external}}
  - {{name: decode, {_PATIENT}, role: decode, engine: external}}
edges:
  - {{from: prefill, to: decode, mode: write}}
"""


def open_deployment(port: int) -> str:
    return f"""{_head_of_deployment(port)}
  - {{name: engines, {_PATIENT}, role: both, open: {{max_nodes: 8}}}}
edges:
  - {{from: engines, to: engines, mode: read}}
"""


def small_layout() -> troupe.Layout:
    """2 layers of 2 heads of 8 elements of 2 bytes, 4 tokens a block, 8 blocks: one region of 4 KiB."""
    return troupe.Layout.packed([troupe.LayerShape(kv_heads=2, head_dim=8)] * 2, dtype="bf16", block_tokens=4, blocks=8)


def opaque_layout(packing: str = "tiles", model: bytes = b"") -> troupe.Layout:
    """The first layer of `small_layout`, and a layer with 24 packed bytes per head of a block: two regions."""
    packed = troupe.LayerShape(troupe.LayerKind.OPAQUE, kv_heads=2, packing=packing, unit=troupe.OpaqueUnit.BLOCK_HEAD)
    heads = troupe.Plane(region=1, heads=2, base=0, block_stride=48, token_stride=0, head_stride=24, head_bytes=24)
    layers = [small_layout().layers()[0], (packed, [heads])]
    return troupe.Layout(layers, dtype="bf16", block_tokens=4, blocks=8, model=model)


def grouped_layout() -> troupe.Layout:
    """4 layers over the bytes of the 2 of `small_layout`: 0 and 2 keep every token, 1 and 3 a window."""
    own = small_layout().layers()
    layers = [own[0], own[0], own[1], own[1]]
    groups = [troupe.LayerGroup((0, 2)), troupe.LayerGroup((1, 3))]
    return troupe.Layout(layers, dtype="bf16", block_tokens=4, blocks=8, groups=groups)


def pattern(size: int) -> bytearray:
    return bytearray((i * 7 + 1) % 251 for i in range(size))


def assert_same_cache(ours: memoryview, theirs: memoryview) -> None:
    """Checks that every head of every token in RECEIVED equals that in SENT."""
    layout = small_layout()
    for layer in range(2):
        for plane in range(2):
            for token in range(TOKENS):
                for head in range(2):
                    _, at, length = layout.locate(SENT, layer=layer, plane=plane, token=token, head=head)
                    _, to, _ = layout.locate(RECEIVED, layer=layer, plane=plane, token=token, head=head)
                    assert theirs[at : at + length] == ours[to : to + length], (layer, plane, token, head)


class Supervisor:
    def __init__(self, folder: Path, deployment_at: Callable[[int], str] = deployment) -> None:
        self._file = folder / "deployment.yaml"
        self._file.write_text(deployment_at(0))
        self._out = folder / "up.out"
        with self._out.open("wb") as out:
            self.process = subprocess.Popen(
                [os.environ["TROUPE_COMMAND"], "up", str(self._file)], stdout=out, stderr=subprocess.STDOUT
            )
        self.port = self._wait_for_port()
        self.text = deployment_at(self.port)

    def _wait_for_port(self) -> int:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = re.search(r"listens at 127\.0\.0\.1:(\d+)\n", self._out.read_text())
            if found:
                return int(found.group(1))
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"the supervisor did not start: {self._out.read_text()}")

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


@pytest.fixture(scope="session")
def _quiet() -> None:
    troupe.configure_logging(level="warn")


@pytest.fixture
def supervisor(tmp_path: Path, _quiet: None) -> Iterator[Supervisor]:
    started = Supervisor(tmp_path)
    yield started
    started.end()


@pytest.fixture
def open_supervisor(tmp_path: Path, _quiet: None) -> Iterator[Supervisor]:
    """The deployment with one stage whose nodes no file names."""
    started = Supervisor(tmp_path, open_deployment)
    yield started
    started.end()


class Pair:
    """A prefill and a decode engine in this process."""

    def __init__(self, supervisor: Supervisor, **more: object) -> None:
        layout = small_layout()
        self.sent = pattern(layout.region_sizes()[0])
        self.received = bytearray(len(self.sent))
        self.prefill = troupe.Engine("prefill-0", text=supervisor.text, layout=layout, regions=[self.sent], **more)
        self.decode = troupe.Engine("decode-0", text=supervisor.text, layout=layout, regions=[self.received], **more)
        self.prefill.wait_registered(PATIENCE)
        self.decode.wait_registered(PATIENCE)

    def send(self, request: str = "r") -> troupe.Operation:
        return self.prefill.send(request, SENT)

    def receive(self, request: str = "r") -> troupe.Operation:
        return self.decode.receive(request, sources=["prefill-0"], tokens=TOKENS, blocks=RECEIVED)

    def finish(self, send: troupe.Operation, aux: bytes = b"") -> None:
        self.prefill.layers_ready(send, 0, 2, TOKENS)
        self.prefill.seal(send, TOKENS, aux)

    def stop(self) -> None:
        self.prefill.stop()
        self.decode.stop()


@pytest.fixture
def pair(supervisor: Supervisor) -> Iterator[Pair]:
    both = Pair(supervisor)
    yield both
    both.stop()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs it `count` times at once, each with its number; raises the first exception."""
    with ThreadPoolExecutor(count) as pool:
        for ended in [pool.submit(work, number) for number in range(count)]:
            ended.result(PATIENCE)


def run_python(code: str, *arguments: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """Starts another process with this interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
