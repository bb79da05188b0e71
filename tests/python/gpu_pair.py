"""Two processes whose caches are torch tensors of a GPU. By hand, on a machine with a GPU: CI has none.

Usage: TROUPE_COMMAND=troupe gpu_pair.py [--gpus PREFILL,DECODE] [--masked] [--blocks N]

Moves a prompt in every form that `Memory.of` takes (tensor, storage, __dlpack__, __cuda_array_interface__): pushed
layer by layer behind events of the computing stream, and pulled at once, with the decode side's stream waiting on
the GPU.
Compares every byte, and checks that invalid calls are refused. Exits with 0 and prints what moved, or says what is
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import troupe

LAYERS, HEADS, DIM, BLOCK = 8, 8, 128, 16
FORMS = ("tensor", "storage", "dlpack", "interface")
PATIENCE = 120.0


class Interface:
    """An object that has only `__cuda_array_interface__`."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = tensor.view(torch.uint8).__cuda_array_interface__


class Dlpack:
    """An object that has only `__dlpack__`."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **how: Any) -> Any:
        return self.tensor.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def as_form(tensor: Any, form: str) -> Any:
    flat = tensor.view(torch.uint8)
    forms = {
        "tensor": lambda: tensor,
        "storage": tensor.untyped_storage,
        "dlpack": lambda: Dlpack(flat),
        "interface": lambda: Interface(flat),
    }
    return forms[form]()


def deployment(port: int, mode: str) -> str:
    return f"""
cluster: gpu
supervisor: {{host: 127.0.0.1, port: {port}, state_file: none}}
security: {{mode: none}}
stages:
  - {{name: prefill, role: prefill, engine: external, transport: {{backend: xgmi}}}}
  - {{name: decode, role: decode, engine: external, transport: {{backend: xgmi}}}}
edges:
  - {{from: prefill, to: decode, mode: {mode}}}
"""


def layout_of(blocks: int) -> troupe.Layout:
    shapes = [troupe.LayerShape(kv_heads=HEADS, head_dim=DIM)] * LAYERS
    return troupe.Layout.packed(shapes, dtype="bf16", block_tokens=BLOCK, blocks=blocks)


def numbers(tokens: int, device: torch.device) -> Any:
    """The values of token t of layer l: [layer][kv][token][head][dim], different everywhere."""
    count = LAYERS * 2 * tokens * HEADS * DIM
    mixed = (torch.arange(count, device=device, dtype=torch.int64) * 2654435761) % 65521
    return mixed.to(torch.int16).view(LAYERS, 2, tokens, HEADS, DIM)


def cache_of(blocks: int, device: torch.device) -> Any:
    """[layer][block][kv][token][head][dim], as in `Layout.packed`."""
    return torch.zeros((LAYERS, blocks, 2, BLOCK, HEADS, DIM), dtype=torch.int16, device=device)


def blocks_of(count: int, step: int) -> list[int]:
    """All block numbers, shuffled: `step` is coprime to `count`."""
    return [i * step % count for i in range(count)]


def place_of(cache: Any, layer: int, blocks: list[int]) -> Any:
    """A copy of the blocks of a layer, in the order of the prompt."""
    return cache[layer, blocks]


def prefill(options: argparse.Namespace, text: str) -> None:
    device = torch.device("cuda", options.gpu)
    tokens, count = options.blocks * BLOCK, options.blocks
    cache = cache_of(count, device)
    said = numbers(tokens, device)
    regions = [as_form(cache, options.form)]
    with troupe.Engine("prefill-0", text=text, layout=layout_of(count), regions=regions) as engine:
        engine.wait_registered(PATIENCE)
        refuse_what_must_be(cache, text)
        blocks = blocks_of(count, 7)
        stream = torch.cuda.Stream(device)
        send = engine.send("r", blocks)
        with torch.cuda.stream(stream):
            for layer in range(LAYERS):
                torch.cuda._sleep(20_000_000)  # the layer's kernels
                cache[layer, blocks] = said[layer].view(2, count, BLOCK, HEADS, DIM).transpose(0, 1)
                computed = torch.cuda.Event()
                computed.record(stream)
                engine.layers_ready(send, layer, layer + 1, tokens, event=computed.cuda_event, gpu=options.gpu)
        engine.seal(send, tokens, aux=b"first token")
        print(json.dumps({"sent": engine.wait(send, PATIENCE).bytes_moved}), flush=True)


def decode(options: argparse.Namespace, text: str) -> None:
    device = torch.device("cuda", options.gpu)
    tokens, count = options.blocks * BLOCK, options.blocks
    cache = cache_of(count, device)
    regions = [as_form(cache, options.form)]
    with troupe.Engine("decode-0", text=text, layout=layout_of(count), regions=regions) as engine:
        engine.wait_registered(PATIENCE)
        blocks = blocks_of(count, 11)
        begun = time.monotonic()
        receive = engine.receive("r", tokens=tokens, sources=["prefill-0"], blocks=blocks, mode=options.mode)
        stream = torch.cuda.Stream(device)
        wanted = numbers(tokens, device)
        same = torch.zeros(LAYERS, dtype=torch.bool, device=device)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            for layer in range(LAYERS):
                engine.await_layers(receive, layer, layer + 1, tokens, stream=stream.cuda_stream, gpu=options.gpu)
                found = place_of(cache, layer, blocks).transpose(0, 1).reshape(2, tokens, HEADS, DIM)
                same[layer] = (found == wanted[layer]).all()
        outcome = engine.wait(receive, PATIENCE)
        stream.synchronize()
        if not bool(same.all()):
            sys.exit(f"decode-0: layers {[i for i, ok in enumerate(same.tolist()) if not ok]} are not what was sent")
        if outcome.aux != b"first token":
            sys.exit(f"decode-0: aux is {outcome.aux!r}")
        print(
            json.dumps(
                {
                    "received": outcome.bytes_moved,
                    "backend": outcome.backend,
                    "seconds": round(time.monotonic() - begun, 3),
                }
            ),
            flush=True,
        )


def refuse_what_must_be(cache: Any, text: str) -> None:
    """Each invalid call gets its error, and nothing is lost: the running engine goes on."""
    small = cache[:, :1, :, :1].contiguous()
    try:
        troupe.Engine("decode-0", text=text, layout=layout_of(cache.shape[1]), regions=[small]).stop()
    except troupe.TroupeError as refused:
        print(json.dumps({"refused": "too small", "code": refused.code.name, "why": str(refused)}), flush=True)
    else:
        sys.exit("prefill-0: a region that is too small was taken")
    try:
        troupe.Memory.of(cache.transpose(0, 1))
    except ValueError:
        pass
    else:
        sys.exit("prefill-0: a tensor that is not contiguous was taken")


def pair(options: argparse.Namespace, mode: str, form: str, folder: Path) -> None:
    up = folder / f"{mode}-{form}.yaml"
    up.write_text(deployment(0, mode))
    command = [os.environ["TROUPE_COMMAND"], "up", str(up)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            port = 0
            for line in supervisor.stdout:
                found = re.search(r"listens at 127\.0\.0\.1:(\d+)$", line.strip())
                if found:
                    port = int(found.group(1))
                    break
            here = [sys.executable, __file__, "--port", str(port), "--mode", mode, "--form", form]
            here += ["--blocks", str(options.blocks)]
            gpus = options.gpus.split(",")
            sides = [
                subprocess.Popen(
                    [*here, "--side", side, "--gpu", "0" if options.masked else gpu],
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if options.masked else None,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for side, gpu in zip(("prefill", "decode"), (gpus[0], gpus[-1]), strict=True)
            ]
            said = [side.communicate(timeout=2 * PATIENCE)[0].split("\n") for side in sides]
            print(f"{mode} {form}: " + " ".join(line for lines in said for line in lines if line), flush=True)
            if any(side.returncode for side in sides):
                sys.exit(f"{mode} {form}: a side failed")
        finally:
            supervisor.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", default="0", help="of the prefill and the decode side")
    parser.add_argument("--masked", action="store_true", help="each side sees its own GPU alone")
    parser.add_argument("--blocks", type=int, default=257, help="of 16 tokens, a prime")
    parser.add_argument("--side")
    parser.add_argument("--port", type=int)
    parser.add_argument("--mode")
    parser.add_argument("--form")
    parser.add_argument("--gpu", type=int)
    options = parser.parse_args()
    if options.side:
        troupe.configure_logging(level="warn")
        torch.cuda.set_device(options.gpu)  # by DLPack, torch exports only memory of its current GPU
        side = {"prefill": prefill, "decode": decode}[options.side]
        side(options, deployment(options.port, options.mode))
        return
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("write", "read"):
            for form in FORMS:
                pair(options, mode, form, Path(folder))
    print("identical: yes")


if __name__ == "__main__":
    main()
