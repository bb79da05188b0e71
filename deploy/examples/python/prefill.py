"""A prefill engine with a cache of its own. Usage: prefill.py DEPLOYMENT"""
import sys

import troupe

LAYERS, TOKENS = 4, 100
shapes = [troupe.LayerShape(kv_heads=2, head_dim=64)] * LAYERS
layout = troupe.Layout.packed(shapes, dtype="bf16", block_tokens=16, blocks=32)
cache = bytearray(layout.region_sizes()[0])  # or a torch tensor, of the CPU or of a GPU
with troupe.Engine("prefill-0", file=sys.argv[1], layout=layout, regions=[cache]) as engine:
    engine.wait_registered()
    send = engine.send("r", blocks=[9, 4, 5, 1, 0, 7, 2])
    cache[:] = bytes([7]) * len(cache)  # your kernels; each layer, once it is computed:
    for layer in range(LAYERS):
        engine.layers_ready(send, layer, layer + 1, TOKENS)
    engine.seal(send, TOKENS, aux=b"first token")
    print(f"prefill-0: {engine.wait(send).bytes_moved} bytes sent")
