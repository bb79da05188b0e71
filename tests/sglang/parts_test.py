"""The parts of Troupe's transfer backend that need no SGLang: settings, pages, rows of metadata, layouts of caches.

Run by ctest, sglang.parts, with the paths of the troupe command and of libtroupe.so.0.
"""
import array
import json
import os
import pathlib
import random
import subprocess
import sys
import types
import unittest
import unittest.mock

import numpy as np
import yaml

from troupe.errors import ErrorCode, TroupeError
from troupe.layout import LayerKind
from troupe.sglang.layouts import Geometry, caches_of
from troupe.sglang.pages import blocks_of, placeholders
from troupe.sglang.rows import MAX_ROW, Rows
from troupe.sglang.settings import VARIABLE, read_settings, settings_of
from troupe.sglang.told import RankNodes, ServerNodes


class Settings(unittest.TestCase):
    def test_without_a_word_a_process_finds_or_begins_its_supervisor(self):
        said = yaml.safe_load(settings_of({}).text)
        self.assertEqual(said["supervisor"], {"port": 0, "begin": True, "heartbeat_timeout": "10s"})
        self.assertEqual((said["cluster"], said["stages"][0]["role"]), ("sglang", "both"))
        self.assertEqual(said["edges"], [{"from": "sglang", "to": "sglang", "mode": "write"}])

    def test_what_is_said_is_in_the_deployment(self):
        settings = settings_of({"cluster": "a", "supervisor": "h:7400", "backend": "tcp", "num_workers": 2})
        said = yaml.safe_load(settings.text)
        self.assertEqual((said["cluster"], said["supervisor"]["host"], said["supervisor"]["port"]), ("a", "h", 7400))
        self.assertEqual(said["stages"][0]["transport"], {"peer_silence": "10s", "backend": "tcp", "num_workers": 2})
        self.assertEqual(settings.cluster, "a, supervisor h:7400")
        self.assertEqual((settings_of({"deployment": "f"}).file, settings_of({"deployment": "f"}).cluster), ("f", ""))

    def test_a_slip_is_refused_and_says_what_was_meant(self):
        for said, why in (({"suprevisor": "h:1"}, "knows no 'suprevisor'; did you mean 'supervisor'"), ({"x": 1}, "it has backend"),
                          ({"supervisor": "h"}, "'supervisor' of TROUPE_SGLANG is 'h'; give host:port"),
                          ({"cluster": ""}, "'cluster'"), ({"backend": "nvlink"}, "give one of auto, rdma"),
                          ({"num_workers": "2"}, "give a whole number"), ({"num_workers": True}, "give a whole number"),
                          ({"deployment": "f", "backend": "tcp"},
                           "'backend' .* cannot be given with 'deployment'; set it in that file"),
                          ([], "give a mapping")):
            with self.assertRaisesRegex(ValueError, why, msg=str(said)):
                settings_of(said)

    def test_they_are_read_from_the_environment(self):
        for said, cluster in (("", "sglang"), ('{"cluster": "b"}', "b")):
            with unittest.mock.patch.dict(os.environ, {VARIABLE: said}):
                self.assertTrue(read_settings().cluster.startswith(f"{cluster}, supervisor begun on "))
        with unittest.mock.patch.dict(os.environ, {VARIABLE: "supervisor=h:1"}), \
                self.assertRaisesRegex(ValueError, "TROUPE_SGLANG is not JSON"):
            read_settings()


class Pages(unittest.TestCase):
    def test_a_page_is_as_many_blocks_as_it_has_tokens(self):
        self.assertEqual(list(blocks_of(np.array([3, 0], dtype=np.int32), 4)), [12, 13, 14, 15, 0, 1, 2, 3])
        self.assertEqual(list(blocks_of([5, 2], 1)), [5, 2])
        self.assertEqual(list(blocks_of([], 16)), [])
        self.assertEqual(blocks_of([2**31 - 1], 1), array.array("I", [2**31 - 1]))

    def test_a_page_that_is_none_is_refused(self):
        with self.assertRaisesRegex(ValueError, "there is no page -1"):
            blocks_of([4, -1], 2)

    def test_placeholders_are_distinct_and_not_in_use(self):
        numbers = random.Random(1)
        for _ in range(50):
            blocks = numbers.randrange(1, 60)
            used = array.array("I", numbers.sample(range(blocks), numbers.randrange(blocks)))
            count = numbers.randrange(blocks - len(used) + 1)
            found = placeholders(count, used, blocks)
            self.assertEqual(len(set(found) - set(used)), count)
            self.assertLess(max(found, default=0), blocks)
        with self.assertRaisesRegex(ValueError, "do not fit a cache of 3 blocks"):
            placeholders(2, array.array("I", [0, 1]), 3)


class MetadataRows(unittest.TestCase):
    def rows(self, *sizes, count=4):
        buffers = [np.zeros((count, size), dtype=np.uint8) for size in sizes]
        return buffers, Rows([one.ctypes.data for one in buffers], [one.nbytes for one in buffers], list(sizes))

    def test_what_is_packed_is_unpacked_into_another_row(self):
        theirs, sender = self.rows(64, 5, 512)
        ours, receiver = self.rows(64, 5, 512, count=9)
        for number, buffer in enumerate(theirs):
            buffer[2] = np.arange(buffer.shape[1], dtype=np.uint8) + number
        receiver.unpack(sender.pack(2), 8)
        for one, other in zip(theirs, ours, strict=True):
            self.assertTrue((one[2] == other[8]).all())
            self.assertFalse(other[:8].any())

    def test_other_rows_are_refused_and_nothing_is_written(self):
        ours, receiver = self.rows(64, 8)
        for sizes, said in (((64, 16), r"rows of 64\+16 bytes, that of this server rows of 64\+8"), ((64,), "rows of 64 bytes"),
                            ((64, 8, 8), r"64\+8\+8")):
            theirs, sender = self.rows(*sizes)
            theirs[0][:] = 7
            with self.assertRaisesRegex(ValueError, said):
                receiver.unpack(sender.pack(0), 1)
        for garbage in (b"", b"\1", b"\2\0\0\0", b"\xff" * 100):
            with self.assertRaisesRegex(ValueError, "metadata of the prefill server"):
                receiver.unpack(garbage, 1)
        self.assertFalse(ours[0].any())

    def test_a_row_that_is_not_there_is_refused(self):
        _, rows = self.rows(64, 8)
        for index in (-1, 4, 1 << 40):
            with self.assertRaises(IndexError):
                rows.pack(index)

    def test_a_row_that_is_too_large_is_refused(self):
        with self.assertRaisesRegex(ValueError, "Troupe carries 65536"):
            self.rows(64, MAX_ROW)
        with self.assertRaisesRegex(ValueError, "1 metadata buffers, 2 sizes"):
            Rows([1], [1, 2], [1])


def arguments(*, layers=2, pages=10, page=16, item=16 * 64, drafts=0, **more):
    """The numbers that SGLang gives for a cache with keys and values."""
    count = 2 * (layers + drafts)
    said = {"kv_data_ptrs": [(n + 1) << 24 for n in range(count)], "kv_data_lens": [pages * item] * count,
            "kv_item_lens": [item] * count, "num_draft_entries": 2 * drafts, "kv_cache_dtype_str": "bfloat16",
            "kv_layer_ids": [], "state_types": [], "state_data_ptrs": [], "state_data_lens": [], "state_item_lens": []}
    return types.SimpleNamespace(**{**said, **more})


def state(kind, ptrs, lens, items, **more):
    lists = {"state_types": [kind], "state_data_ptrs": [ptrs], "state_data_lens": [lens], "state_item_lens": [items]}
    return {**lists, **{key: [value] for key, value in more.items()}}


class Layouts(unittest.TestCase):
    def test_keys_and_values_of_a_rank(self):
        [cache] = caches_of(arguments(), Geometry(16, tp_rank=1, tp_size=2, kv_heads=8))
        layout = cache.layout
        self.assertEqual((cache.name, cache.layers, cache.item_blocks), ("kv", 2, 16))
        self.assertEqual((layout.block_tokens, layout.blocks, layout.tp_rank, layout.tp_size), (1, 160, 1, 2))
        shape, planes = layout.layers()[1]
        self.assertEqual((shape.kind, shape.kv_heads, shape.head_dim, shape.value_dim), (LayerKind.ATTENTION, 8, 16, 0))
        self.assertEqual([plane.heads for plane in planes], [4, 4])
        self.assertEqual(layout.region_sizes(), [10 * 16 * 64] * 4)
        self.assertEqual([region.address >> 24 for region in cache.regions], [1, 3, 2, 4])  # a layer's keys, then values

    def test_a_token_lies_where_sglang_has_it(self):
        [cache] = caches_of(arguments(), Geometry(16, kv_heads=4))
        page, token, head = 7, 5, 3
        region, offset, length = cache.layout.locate(blocks_of([2, page], 16), layer=1, plane=1, token=16 + token, head=head)
        self.assertEqual((cache.regions[region].address >> 24, offset, length),
                         (4, page * 16 * 64 + token * 64 + head * 16, 16))

    def test_one_head_is_on_each_rank_where_there_are_fewer(self):
        [cache] = caches_of(arguments(), Geometry(16, tp_rank=3, tp_size=4, kv_heads=2))
        self.assertEqual([plane.heads for plane in cache.layout.layers()[0][1]], [1, 1])

    def test_sizes_that_differ_are_told_apart(self):
        wide = arguments(kv_item_lens=[16 * 64, 16 * 64, 16 * 96, 16 * 96], kv_data_lens=[10 * 16 * 64] * 2 + [10 * 16 * 96] * 2)
        shape, _ = caches_of(wide, Geometry(16, kv_heads=4))[0].layout.layers()[0]
        self.assertEqual((shape.head_dim, shape.value_dim), (16, 24))

    def test_a_latent_has_no_heads(self):
        [cache] = caches_of(arguments(), Geometry(16, tp_rank=1, tp_size=2, is_mla=True))
        self.assertEqual([shape.kind for shape, _ in cache.layout.layers()], [LayerKind.MLA] * 4)

    def test_the_layers_of_a_draft_model_come_last(self):
        [cache] = caches_of(arguments(drafts=1), Geometry(16, kv_heads=4))
        self.assertEqual([region.address >> 24 for region in cache.regions], [1, 3, 2, 4, 5, 6])
        with self.assertRaisesRegex(ValueError, "draft model between pipelines"):
            caches_of(arguments(drafts=1), Geometry(16, kv_heads=4, pp_size=2, kv_layers=4))

    def test_a_part_of_a_pipeline_says_which_layers_it_has(self):
        [cache] = caches_of(arguments(), Geometry(16, kv_heads=4, pp_rank=1, pp_size=2, first_layer=3, kv_layers=5))
        self.assertEqual((cache.layout.first_layer, cache.layout.total_layers), (3, 5))

    def test_what_differs_between_servers_is_named_with_both_values(self):
        def layout(geometry=None, **more):
            return caches_of(arguments(**more), geometry or Geometry(16, kv_heads=4))[0].layout

        ours = layout()
        ours.check_compatible(layout(pages=3))
        ours.check_compatible(layout(Geometry(32, kv_heads=4), page=32, item=32 * 64))
        for other, said in ((layout(kv_cache_dtype_str="fp8_e4m3"), "bfloat16.*fp8_e4m3"), (layout(layers=3), "2.*3"),
                            (layout(Geometry(16, kv_heads=2)), "4.*2"), (layout(Geometry(16, is_mla=True)), "")):
            with self.assertRaisesRegex(TroupeError, said) as caught:
                ours.check_compatible(other)
            self.assertEqual(caught.exception.code, ErrorCode.LAYOUT_MISMATCH)

    def test_memory_that_contradicts_itself_is_refused_by_name(self):
        geometry = Geometry(16, kv_heads=4)
        for more, said in (({"item": 16 * 64 + 1}, "number 0 has .* pages of 1025 bytes, which do not fit 16 tokens per page"),
                           ({"item": 16 * 66}, "66 and 66 bytes per token, which do not divide into 4 heads"),
                           ({"kv_data_ptrs": [1 << 24] * 4}, "named twice at one address.*unified memory"),
                           ({"kv_data_lens": [7] * 4}, "number 0 has 7 bytes"), ({"kv_data_lens": [1]}, "4 addresses, 1 sizes"),
                           ({"kv_data_ptrs": [], "kv_data_lens": [], "kv_item_lens": []}, "there are none"),
                           ({"mla_compression_ratios": [4]}, "DeepSeek-V4"),
                           (state("dsa_tail", [9], [9], [9]), "does not move the state component 'dsa_tail'")):
            with self.assertRaisesRegex(ValueError, said, msg=str(more)):
                caches_of(arguments(**more), geometry)


class StateCaches(unittest.TestCase):
    GEOMETRY = Geometry(16, kv_heads=4, tp_rank=1, tp_size=2, hidden_layers=4, end_hidden_layer=4)

    def mamba(self, **more):
        lists = {"state_dim_per_tensor": [8, 6, 0], "state_conv_shard_groups": [[4, 4, 8], None, None],
                 "state_slice_outer_counts": [3, 1, 1], "state_layer_ids": [2, 2, 3], **more}
        return arguments(**state("mamba", [1 << 30, 2 << 30, 3 << 30], [480, 240, 80], [48, 24, 8], **lists))

    def test_slots_are_sliced_as_sglang_says(self):
        _, cache = caches_of(self.mamba(), self.GEOMETRY)
        self.assertTrue(cache.is_slot)
        self.assertEqual((cache.name, cache.component, cache.layers, cache.layout.blocks), ("mamba", 0, 4, 10))
        self.assertEqual(cache.layout.region_sizes(), [480, 240, 80])

    def test_slots_of_other_sizes_of_tensor_parallelism_fit_unless_nobody_says_how(self):
        def layout(rank, ranks, items, **more):
            geometry = Geometry(16, kv_heads=4, tp_rank=rank, tp_size=ranks, hidden_layers=4, end_hidden_layer=4)
            said = self.mamba(**more)
            said.state_item_lens = [items]
            if more.get("state_dim_per_tensor") is None:
                said.state_dim_per_tensor = [[8 * 2 // ranks, 6 * 2 // ranks, 0]]
            return caches_of(said, geometry)[1].layout

        layout(1, 2, [48, 24, 8]).check_compatible(layout(0, 1, [96, 48, 8]))
        with self.assertRaisesRegex(TroupeError, "tp2.*tp1"):
            layout(1, 2, [48, 24, 8], state_dim_per_tensor=[]).check_compatible(layout(0, 1, [96, 48, 8], state_dim_per_tensor=[]))

    def test_slots_that_contradict_themselves_are_refused(self):
        for more, said in (({"state_dim_per_tensor": [7, 6, 0]}, "state buffer 0: slots of 48 bytes are not 3 rows of 7"),
                           ({"state_conv_shard_groups": [[5, 3, 8], None, None]}, r"groups of \[5, 3, 8\] elements do not divide into 2 ranks")):
            with self.assertRaisesRegex(ValueError, said):
                caches_of(self.mamba(**more), self.GEOMETRY)
        with self.assertRaisesRegex(ValueError, "'mamba' has no memory"):
            caches_of(arguments(**state("mamba", [], [], [])), self.GEOMETRY)

    def test_windows_have_pages_of_their_own_number(self):
        said = state("swa", [1 << 30, 2 << 30], [5 * 16 * 32] * 2, [16 * 32] * 2)
        _, cache = caches_of(arguments(**said, swa_kv_cache_layout="nhd"), Geometry(16, kv_heads=4, swa_heads=2))
        self.assertEqual((cache.name, cache.item_blocks, cache.layout.blocks), ("swa", 16, 80))
        _, other = caches_of(arguments(**said, swa_kv_cache_layout="hnd"), Geometry(16, kv_heads=4, swa_heads=2))
        self.assertEqual((other.item_blocks, other.layout.blocks), (1, 5))
        self.assertEqual(other.layout.layers()[0][0].kind, LayerKind.OPAQUE)

    def test_index_keys_are_layers_of_the_cache_and_may_be_left_out(self):
        def layout(sizes, page=16):
            said = state("dsa", [n << 30 for n in range(1, 5)], sizes, [page * 6] * 4)
            return caches_of(arguments(page=page, item=page * 64, **said), Geometry(page, is_mla=True))[0].layout

        every, shared = [10 * 16 * 6] * 4, [10 * 16 * 6, 0, 10 * 16 * 6, 0]
        self.assertEqual([shape.kind for shape, _ in layout(shared).layers()],
                         [LayerKind.MLA, LayerKind.MLA, LayerKind.MLA, LayerKind.RECURRENT] * 2)
        layout(shared).check_compatible(layout(shared))
        with self.assertRaises(TroupeError):
            layout(every).check_compatible(layout(shared))
        with self.assertRaisesRegex(TroupeError, "index of 16.*index of 32"):  # packed by pages
            layout(every).check_compatible(layout([10 * 32 * 6] * 4, page=32))
        with self.assertRaisesRegex(ValueError, "index keys of 1 layers, and keys and values of 4"):
            caches_of(arguments(**state("dsa", [9], [960], [96])), Geometry(16, is_mla=True))

    def test_components_come_once_and_not_between_pipelines(self):
        twice = {key: value * 2 for key, value in state("swa_ring", [9 << 30], [100], [10]).items()}
        with self.assertRaisesRegex(ValueError, "two state components 'swa_ring'"):
            caches_of(arguments(**twice), Geometry(16, kv_heads=4))
        with self.assertRaisesRegex(ValueError, "'swa_ring' between pipelines"):
            caches_of(arguments(**state("swa_ring", [9 << 30], [100], [10])), Geometry(16, kv_heads=4, pp_size=2))
        with self.assertRaisesRegex(ValueError, "'swa_ring' has no memory"):
            caches_of(arguments(**state("swa_ring", [9 << 30], [0], [10])), Geometry(16, kv_heads=4))


class Told(unittest.TestCase):
    RANK = RankNodes(9, "c", ("kv", "mamba"), ("a", "b"), (1, 2**64 - 1))

    def test_what_ranks_say_is_put_together_in_their_order(self):
        other = RankNodes(9, "c", ("kv", "mamba"), ("d", "e"), (3, 4))
        server = ServerNodes.of_ranks([self.RANK, other])
        self.assertEqual((server.nodes, server.lives), ((("a", "d"), ("b", "e")), ((1, 3), (2**64 - 1, 4))))
        self.assertEqual([server.life_of(node) for node in "abdex"], [1, 2**64 - 1, 3, 4, None])
        for ranks in ([], [self.RANK, None], [self.RANK, RankNodes(9, "c", ("kv",), ("d",), (3,))]):
            self.assertIsNone(ServerNodes.of_ranks(ranks))

    def test_it_comes_through_json(self):
        server = ServerNodes.of_ranks([self.RANK] * 3)
        self.assertEqual(RankNodes.of_json(json.loads(json.dumps(self.RANK.to_json()))), self.RANK)
        self.assertEqual(ServerNodes.of_json(json.loads(json.dumps(server.to_json()))), server)

    def test_anything_else_is_refused(self):
        rank = json.loads(json.dumps(self.RANK.to_json()))
        server = json.loads(json.dumps(ServerNodes.of_ranks([self.RANK]).to_json()))
        for kind, good in ((RankNodes, rank), (ServerNodes, server)):
            kind.of_json(good)
            for key in good:
                for bad in (None, True, -1, 2**64, 1.5, {}, [], [1], ["x"], [["x"]], [[], []]):
                    with self.subTest(kind=kind.__name__, key=key, bad=bad), self.assertRaises(ValueError):
                        kind.of_json({**good, key: bad})
            for bad in (None, [], "x", {}):
                with self.assertRaises(ValueError):
                    kind.of_json(bad)


class Imports(unittest.TestCase):
    def test_the_package_loads_nothing(self):
        said = "import json, sys, troupe.plugins, troupe.sglang\nprint(json.dumps([name for name in sys.argv[1:] if name in " \
               "sys.modules] + ['library'] * ('libtroupe' in open('/proc/self/maps').read())))"
        ended = subprocess.run([sys.executable, "-c", said, "numpy", "requests", "sglang", "torch"], capture_output=True,
                               text=True, check=True)
        self.assertEqual(json.loads(ended.stdout), [])


if __name__ == "__main__":
    os.environ.update(TROUPE_COMMAND=str(pathlib.Path(sys.argv[1]).resolve()),
                      TROUPE_LIBRARY=str(pathlib.Path(sys.argv[2]).resolve()))
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
