"""A decode engine with a cache of its own. Usage: decode.py DEPLOYMENT"""
import sys

import troupe

TOKENS = 100
shapes = [troupe.LayerShape(kv_heads=2, head_dim=64)] * 4
layout = troupe.Layout.packed(shapes, dtype="bf16", block_tokens=16, blocks=32)
cache = bytearray(layout.region_sizes()[0])
with troupe.Engine("decode-0", file=sys.argv[1], layout=layout, regions=[cache]) as engine:
    engine.wait_registered()
    placed = engine.wait(engine.place("r", timeout=10)).placement
    blocks = [3, 8, 11, 2, 30, 6, 5]
    arrived = engine.wait(engine.receive(placement=placed, tokens=TOKENS, blocks=blocks))
    engine.placed_request_ended("r")
    _, first, length = layout.locate(blocks, layer=3, plane=1, token=TOKENS - 1, head=1)
    if arrived.aux != b"first token" or cache[first : first + length] != bytes([7]) * length:
        sys.exit("decode-0: this is not what was sent")
    print(f"decode-0: {arrived.bytes_moved} bytes arrived")
