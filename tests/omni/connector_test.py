"""Troupe's connector for vLLM-Omni: stages in processes of their own, real nodes, vLLM-Omni's own classes.

Run by ctest, omni.connector, with the paths of the troupe command and of libtroupe.so.0.
"""
import contextlib
import importlib.metadata
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import unittest
import unittest.mock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# pylint: disable=wrong-import-position
import torch
import yaml
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
from vllm_omni.distributed.omni_connectors.utils.initialization import (create_connectors_from_config,
                                                                        load_omni_transfer_config)

import stage as stages
import troupe.omni
import troupe.plugins
from nursery import PATIENCE, Nursery
from stage import Stage, digest, payload
from troupe.engine import Engine, configure_logging
from troupe.errors import ErrorCode, TroupeError
from troupe.omni import connector as connector_module
from troupe.omni import node as node_module
from troupe.omni.connector import TroupeOmniConnector
from troupe.omni.keys import name_of, requests_of
from troupe.omni.payload import Header, Kind, PayloadError, RawPayload, payload_of
from troupe.omni.settings import settings_of

MIB = 1 << 20
SMALL = {"memory": 16 * MIB}  # initial settings of the tests in one process


def until(happens, said, seconds=PATIENCE):
    limit = time.monotonic() + seconds
    while not (found := happens()):
        assert time.monotonic() < limit, said() if callable(said) else said
        time.sleep(0.02)
    return found


class Settings(unittest.TestCase):
    def test_without_a_word_a_process_finds_or_begins_its_supervisor(self):
        settings = settings_of({"stage_id": 2, "role": "receiver"})
        self.assertEqual((settings.stage, settings.file, settings.ttl, settings.timeout), ("2", None, 300.0, 30.0))
        said = yaml.safe_load(settings.text)
        self.assertEqual(said["supervisor"], {"port": 0, "begin": True, "heartbeat_timeout": "10s"})
        self.assertEqual((said["cluster"], said["stages"][0]["pool"]), ("omni", {"size": f"{1 << 30}B"}))

    def test_what_is_said_is_in_the_deployment(self):
        said = yaml.safe_load(settings_of({"memory": "2GiB", "backend": "tcp", "num_workers": 2, "cluster": "a",
                                           "supervisor": "[::1]:7400", "timeout": 5}).text)
        self.assertEqual(said["stages"][0]["pool"], {"size": f"{2 << 30}B"})
        self.assertEqual(said["stages"][0]["transport"], {"peer_silence": "5s", "backend": "tcp", "num_workers": 2})
        self.assertEqual((said["cluster"], said["supervisor"]["host"], said["supervisor"]["port"]), ("a", "::1", 7400))
        self.assertEqual(said["limits"], {"transfer_deadline": "5000ms"})
        self.assertEqual(settings_of({"deployment": "f.yaml", "ttl": 9}).file, "f.yaml")

    def test_processes_without_a_stage_are_of_every_stage(self):
        for said in ({}, {"stage_id": -1}, {"stage_id": None}):
            self.assertIsNone(settings_of(said).stage)
        self.assertEqual(settings_of({"stage_id": 0}).stage, "0")

    def test_a_slip_is_refused_and_says_what_was_meant(self):
        for extra, said in (({"memroy": 1}, "did you mean 'memory'"), ({"suprevisor": 1}, "did you mean 'supervisor'"),
                            ({"memory": "2Gi"}, "'memory' of .* '2Gi'; give bytes"), ({"memory": 1000}, "1MiB or more"),
                            ({"memory": True}, "'memory'"), ({"ttl": 0}, "'ttl' of .* is 0; give seconds"),
                            ({"ttl": "soon"}, "'ttl'"), ({"timeout": -1}, "'timeout'"),
                            ({"backend": "xgmi"}, "'backend'"), ({"num_workers": "two"}, "'num_workers'"),
                            ({"cluster": ""}, "'cluster'"),
                            ({"supervisor": "h"}, "'supervisor' of TroupeOmniConnector is 'h'; give host:port"),
                            ({"deployment": "f", "memory": "1GiB"},
                             "'memory' .* cannot be given with 'deployment'; set it in that file")):
            with self.assertRaisesRegex(ValueError, said, msg=str(extra)):
                settings_of(extra)

    def test_keys_of_the_stages_own_code_are_left_to_it(self):
        own = {"codec_chunk_frames": 25, "shm_threshold_bytes": 65536, "zmq_port": 50051}
        self.assertEqual(settings_of(own).unread, ("codec_chunk_frames", "shm_threshold_bytes", "zmq_port"))


class Keys(unittest.TestCase):
    def test_no_two_payloads_have_one_name(self):
        names = [name_of(*one) for one in (("0", "1", "k"), ("0", "1/k", "x"), ("0/1", "k", "x"), ("0", "1", "k/x"),
                                           ("0", "1", "k\0x"), ("0", "1", "k" * 600), ("0", "1", "k" * 601))]
        self.assertEqual(len({name.header for name in names} | {name.notice for name in names}), 2 * len(names))
        self.assertEqual(name_of(0, 1, "k"), name_of("0", "1", "k"))
        for name in names:
            self.assertLessEqual(len(name.header.encode()), 512)

    def test_names_that_are_none_are_refused(self):
        for arguments, kind, said in ((("", "1", "k"), ValueError, "from_stage is ''"),
                                      (("0", None, "k"), TypeError, "to_stage is .*, not NoneType"),
                                      (("0", "1", ""), ValueError, "key .* is empty"),
                                      (("0", "1", 7), TypeError, "not int"),
                                      (("0", "1", "k" * 4096), ValueError, "4096 are the most")):
            with self.assertRaisesRegex(kind, said):
                name_of(*arguments)

    def test_a_key_says_its_request(self):
        self.assertEqual(requests_of("chatcmpl-7_0_12")[0], "chatcmpl-7")
        self.assertEqual(requests_of("omni_0_to_1_kv_cache_r_1")[0], "r_1")
        self.assertEqual(requests_of("r_0_0_2_3")[0], "r")
        self.assertEqual(requests_of("anything"), ("anything",))


class Headers(unittest.TestCase):
    def header(self, **other):
        return Header(**{"kind": Kind.TENSOR, "identity": b"0\x001\0k", "size": 24, "number": 7, "apart": False,
                         "dtype": "float16", "shape": (3, 4), **other})

    def test_what_is_written_is_read(self):
        for header in (self.header(), self.header(kind=Kind.BYTES, size=5, dtype="", shape=()),
                       self.header(apart=True, dtype="bool", shape=(24,)), self.header(size=2, shape=())):
            body = b"" if header.apart else bytes(header.size)
            self.assertEqual(Header.decode(memoryview(header.encode() + body)), (header, body))

    def test_bytes_that_are_cut_or_flipped_are_refused_or_are_another_header(self):
        raw = self.header().encode() + bytes(24)
        for end in range(len(raw)):
            with self.assertRaises(PayloadError):
                Header.decode(memoryview(raw[:end]))
        chance = random.Random(7)
        for _ in range(3000):
            other = bytearray(raw)
            for _ in range(chance.randint(1, 4)):
                other[chance.randrange(len(other))] = chance.randrange(256)
            with contextlib.suppress(PayloadError):
                header, body = Header.decode(memoryview(other))
                self.assertEqual(len(body), header.size)

    def test_tensors_that_are_not_their_bytes_are_refused(self):
        for other, said in (({"dtype": "floaty"}, "'floaty'"), ({"shape": (3, 5)}, "in 24 bytes"),
                            ({"shape": (2**60, 2**60)}, "in 24 bytes")):
            with self.assertRaisesRegex(PayloadError, said):
                Header.decode(memoryview(self.header(**other).encode() + bytes(24)))

    def test_tensors_that_nobody_moves_are_refused_with_what_to_hand_over(self):
        sparse = torch.eye(3).to_sparse()
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        for tensor, said in ((torch.empty(3, device="meta"), r"on meta; .*hand over tensor.cpu\(\)"),
                             (sparse, r"tensor.to_dense\(\)"), (quantized, r"tensor.int_repr\(\)")):
            with self.assertRaisesRegex(TypeError, said):
                payload_of(tensor, bytes)


class OneProcess(unittest.TestCase):
    """Connectors of several stages in this process, each with its node."""

    def setUp(self):
        self.zero, self.one = self.connector(0), self.connector(1)

    def connector(self, stage, **extra):
        made = TroupeOmniConnector({"stage_id": stage, **SMALL, **extra})
        self.addCleanup(made.close)
        return made

    def put(self, key, data, **more):
        kept, size, metadata = (more.get("connector") or self.zero).put("0", "1", key, data)
        self.assertTrue(kept)
        self.assertEqual(metadata["troupe"]["size"], size)
        return size

    def get(self, key, seconds=10.0, connector=None):
        return (connector or self.one).get_with_deadline("0", "1", key, deadline=time.monotonic() + seconds)

    def test_every_kind_of_payload_arrives_whole_and_once(self):
        for number, kind in enumerate(stages.KINDS):
            data = payload(kind, number + 100)
            size = self.put(kind, data)
            got, moved = self.get(kind)
            self.assertEqual((digest(got), moved), (digest(data), size), kind)
            self.assertEqual(isinstance(got, RawPayload), isinstance(data, (bytes, torch.Tensor)), kind)
            self.assertIsNone(self.one.get("0", "1", kind), kind)

    def test_tensors_of_every_type_and_shape_arrive(self):
        plain = [torch.arange(24, dtype=torch.uint8).view(dtype) for dtype in
                 (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
                  torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)]
        odd = [torch.tensor([True, False, True]), torch.tensor(7.5), torch.empty(0, 3),
               torch.empty(0, dtype=torch.bfloat16), torch.arange(12).reshape(3, 4).t(), torch.arange(12)[::3],
               torch.ones(4, requires_grad=True),
               torch.complex(torch.ones(3), torch.ones(3)).conj(), torch.nn.Parameter(torch.ones(2, 2))]
        for number, tensor in enumerate(plain + odd):
            for many in (tensor, tensor.detach().expand(3000, *tensor.shape)):  # inline, and by itself
                self.put(f"t{number}", many)
                got, size = self.get(f"t{number}")
                self.assertEqual((got.tensor.dtype, got.tensor.shape, size),
                                 (many.dtype, many.shape, many.numel() * many.element_size()))
                self.assertEqual(digest(got), digest(many.detach().resolve_conj()), tensor)
                self.assertFalse(got.tensor.requires_grad)

    def test_a_large_tensor_is_moved_once_and_lies_in_the_nodes_memory_until_it_is_released(self):
        before = self.one.health()["memory_used"]
        self.put("large", torch.arange(MIB, dtype=torch.float32))
        got, size = self.get("large")
        self.assertEqual(size, 4 * MIB)
        self.assertGreaterEqual(self.one.health()["memory_used"] - before, 4 * MIB)
        got.tensor[5] = 1.5  # belongs to the reader alone
        kept = got.tensor[3:]
        again = got.as_tensor(torch.uint8, (4 * MIB,))
        self.assertEqual(again.data_ptr(), got.tensor.data_ptr())
        got.release()
        got.release()
        with self.assertRaisesRegex(RuntimeError, "was released"):
            _ = got.tensor
        self.assertGreaterEqual(self.one.health()["memory_used"] - before, 4 * MIB)  # views of it still exist
        self.assertEqual(kept[2].item(), 1.5)
        del kept, again
        # If the payload was found without the notice of where it is, the notice comes later and stays for a minute.
        until(lambda: self.one.health()["memory_used"] <= before + 64, "the memory was not given back")

    def test_what_was_got_outlives_the_connectors(self):
        data = torch.arange(MIB, dtype=torch.int32)
        self.put("k", data)
        got, _ = self.get("k")
        self.zero.close()
        self.one.close()
        self.assertTrue(torch.equal(got.tensor, data))

    def test_bytes_like_objects_are_bytes(self):
        for number, data in enumerate((b"", b"x", bytearray(b"xyz" * 20_000), memoryview(b"abc"),
                                       memoryview(b"abcdef")[::2])):
            self.put(f"b{number}", data)
            self.assertEqual(self.get(f"b{number}")[0].to_bytes(), bytes(data))

    def test_a_get_before_the_put_finds_it_as_soon_as_it_is_there(self):
        self.assertIsNone(self.one.get("0", "1", "later"))
        delays = []
        for number in range(10):
            key = f"later{number}"
            waiting = threading.Thread(target=lambda key=key: delays.append((self.get(key)[0], time.monotonic())))
            waiting.start()
            time.sleep(0.2)  # the reader has looked in vain by now
            self.put(key, "now")
            put = time.monotonic()
            waiting.join(PATIENCE)
            self.assertEqual(delays[-1][0], "now")
            delays[-1] = delays[-1][1] - put
        # The reader is notified. Without the notice it would look again only after up to a tenth of a second.
        self.assertLess(sorted(delays)[len(delays) // 2], 0.04, delays)

    def test_who_looks_every_millisecond_for_what_is_not_there_asks_other_nodes_seldom(self):
        node = self.one._node
        with unittest.mock.patch.object(node, "begin_get", wraps=node.begin_get) as asked:
            for _ in range(300):
                self.assertIsNone(self.one.get("0", "1", "never"))
                time.sleep(0.001)
        self.assertLess(asked.call_count, 30)
        self.assertGreater(asked.call_count, 0)

    def test_a_get_ends_with_its_deadline(self):
        began = time.monotonic()
        self.assertIsNone(self.get("never", 0.3))
        self.assertLess(time.monotonic() - began, 1.0)
        self.assertGreaterEqual(time.monotonic() - began, 0.3)
        self.assertIsNone(self.get("never", -1.0))

    def test_metadata_saves_a_question_and_nobody_needs_it(self):
        _, _, metadata = self.zero.put("0", "1", "k", "x")
        self.assertEqual(self.one.get("0", "1", "k", metadata), ("x", len(self.one.serialize_obj("x"))))
        for other in (None, {}, {"source_host": "h", "source_port": 1}, {"troupe": 7}, {"troupe": {"node": 7}},
                      {"troupe": {"node": "omni.gone.0"}}):
            self.put("k", "y")
            got = self.one.get_with_deadline("0", "1", "k", other, deadline=time.monotonic() + 10)
            self.assertEqual(got[0], "y", other)

    def test_a_key_that_is_put_again_has_the_new_payload(self):
        for old in ("old", b"o" * 100_000):
            for new in ("new", b"n" * 100_000):
                self.put("k", old)
                self.put("k", new)
                self.assertEqual(digest(self.get("k")[0]), digest(new))
                self.assertIsNone(self.one.get("0", "1", "k"))
                self.put("k", new)  # after the first was taken
                self.assertEqual(digest(self.get("k")[0]), digest(new))

    def test_who_has_found_the_old_payload_does_not_take_the_new_one_away(self):
        self.put("k", "old")
        claimed = self.one._claimed

        def replaced_before(*arguments):
            self.put("k", "new")
            return claimed(*arguments)

        with unittest.mock.patch.object(self.one, "_claimed", replaced_before):
            self.assertIsNone(self.one.get("0", "1", "k"))
        self.assertEqual(self.get("k")[0], "new")

    def test_a_claim_that_no_node_confirmed_is_removed_later(self):
        """Otherwise the payload keeps its memory until it expires, and another reader gets it as well."""
        remove, refused = Engine.remove, []

        def refused_once(engine, peer, key):  # stands for a link that breaks just now
            if engine is self.one._node._engine and peer == self.zero._node.name and key not in refused:
                refused.append(key)
                raise TroupeError(ErrorCode.PEER_LOST, "the link broke")
            return remove(engine, peer, key)

        with unittest.mock.patch.object(Engine, "remove", refused_once):
            for data in ("small", bytes(100_000)):
                self.put("k", data)
                self.assertEqual(digest(self.get("k")[0]), digest(data))
                until(lambda: self.zero.health()["values"] == 0, "it is kept")
        self.assertEqual(len(refused), 2)
        with (unittest.mock.patch.object(connector_module, "CLAIMED", 0.0),  # seconds: no node answers in time
              self.assertLogs("vllm.troupe.omni.node", "WARNING")):
            for number in range(50):
                self.put(f"k{number}", "x")
                self.assertEqual(self.get(f"k{number}")[0], "x")
        until(lambda: self.zero.health()["values"] == 0, "some are kept")
        until(lambda: not self.one._node._owed, "they are asked for without an end")

    def test_stages_and_directions_do_not_mix(self):
        self.put("k", "0 to 1")
        self.assertTrue(self.one.put("1", "0", "k", "1 to 0")[0])
        self.assertTrue(self.zero.put("0", "2", "k", "0 to 2")[0])
        self.assertEqual(self.zero.get_with_deadline("1", "0", "k", deadline=time.monotonic() + 10)[0], "1 to 0")
        self.assertEqual(self.get("k")[0], "0 to 1")
        two = self.connector(2)
        self.assertEqual(two.get_with_deadline("0", "2", "k", deadline=time.monotonic() + 10)[0], "0 to 2")

    def test_a_stage_that_puts_for_another_is_found(self):
        self.put("k", "x", connector=self.connector(7))
        self.assertEqual(self.get("k")[0], "x")

    def test_a_cleanup_drops_what_is_of_the_request_and_no_more(self):
        for key in ("r_0_0", "r_0_1", "omni_0_to_1_kv_cache_r", "r_0_0_0_1", "other_0_0", "r"):
            self.put(key, key)
        self.assertTrue(self.zero.cleanup("r"))
        self.assertFalse(self.zero.cleanup("r"))
        self.assertFalse(self.zero.cleanup("unheard of"))
        self.assertEqual(self.zero.health()["values"], 1)
        self.assertIsNone(self.get("r_0_0", 0.2))
        self.assertEqual(self.get("other_0_0")[0], "other_0_0")
        with self.assertRaisesRegex(TypeError, "request_id is a str"):
            self.zero.cleanup(None)

    def test_what_nobody_gets_is_dropped_with_its_time_which_begins_with_the_newest_of_its_request(self):
        zero = self.connector(0, ttl=1.0)
        zero.put("0", "1", "r_0_0", "first")
        time.sleep(0.7)
        zero.put("0", "1", "r_0_1", "second")
        time.sleep(0.6)
        zero.reap_consumed()
        self.assertEqual(self.get("r_0_0")[0], "first")
        until(lambda: zero.health()["values"] == 0, "it is kept for ever")
        self.assertIsNone(self.get("r_0_1", 0.2))

    def test_a_full_memory_waits_for_readers_and_says_then_who_has_it(self):
        zero = self.connector(0, memory=2 * MIB, timeout=0.5)
        self.assertTrue(zero.put("0", "1", "big_0_0", bytes(MIB + MIB // 2))[0])
        with self.assertLogs("vllm.troupe.omni.connector", "ERROR") as said:
            self.assertEqual(zero.put("0", "1", "more_0_0", bytes(MIB)), (False, 0, None))
        self.assertRegex(said.output[-1], r"no room for 'more_0_0': 10\d+ bytes .* of them of big \(1572864 bytes\)")
        with self.assertLogs("vllm.troupe.omni.connector", "ERROR"):
            self.assertEqual(zero.put("0", "1", "huge", bytes(3 * MIB)), (False, 0, None))
        reader = threading.Timer(0.2, self.get, ("big_0_0",))
        reader.start()
        self.assertTrue(zero.put("0", "1", "more_0_0", bytes(MIB))[0])
        reader.join()

    def test_a_reader_without_room_says_so_and_loses_nothing(self):
        small = self.connector(1, memory=2 * MIB)
        self.put("larger", bytes(4 * MIB))
        with self.assertRaisesRegex(TroupeError, "'larger' at omni.0-.* has 4194304 bytes, .* memory for 2097152"):
            self.get("larger", connector=small)
        self.assertIsNone(self.get("larger", 0.1, connector=small))  # reported once to a polling reader
        self.assertEqual(self.get("larger")[1], 4 * MIB)
        self.put("a", bytes(MIB + MIB // 2))
        self.put("b", bytes(MIB))
        held, _ = self.get("a", connector=small)
        self.assertIsNone(self.get("b", 0.3, connector=small))
        held.release()
        self.assertEqual(self.get("b", connector=small)[1], MIB)

    def test_bytes_that_no_connector_wrote_are_refused_and_removed(self):
        name = name_of("0", "1", "k")
        no_object = Header(Kind.OBJECT, name.identity, 3, 1, False).encode() + b"abc"
        for raw in (b"", b"\x80\x04]", b"TrO1" + bytes(40), no_object):
            self.zero._node.put_own(name.header, raw)
            self.zero._node.put_own("b/1", b"")
            with self.assertRaisesRegex(PayloadError, "'k' at omni.0-"):
                self.get("k")
            for key in (name.header, "b/1"):
                self.zero._node.remove_own(key)
        self.zero._node.put_own(name.header, b"garbage")
        self.put("k", "x")
        self.assertEqual(self.get("k")[0], "x")
        self.zero._node.remove_own(name.header)
        other = Header(Kind.BYTES, name_of("0", "1", "other").identity, 0, 1, False)
        self.zero._node.put_own(name.header, other.encode())
        with self.assertRaisesRegex(PayloadError, "the payload is called 'other'"):
            self.get("k")

    def test_objects_that_are_no_msgpack_do_not_run_code(self):
        class Evil:
            def __reduce__(self):
                return os.system, ("touch evil",)

        with self.assertRaises(TypeError):
            self.zero.put("0", "1", "k", Evil())

    def test_a_search_that_is_abandoned_leaves_nothing(self):
        self.assertIsNone(self.one.get("0", "1", "k"))
        self.assertEqual(len(self.one._searches), 1)
        self.one.abandon_get("k")
        self.one.abandon_get("unheard of")
        self.assertEqual(self.one._searches, {})
        self.put("k", "x")
        self.assertEqual(self.get("k")[0], "x")
        self.assertIsNone(self.one.get("0", "1", "gone"))
        with unittest.mock.patch.object(connector_module, "FORGOTTEN", 0.0):
            self.assertIsNone(self.one.get("0", "1", "other"))
        self.assertNotIn(name_of("0", "1", "gone").identity, self.one._searches)

    def test_outcomes_of_what_nobody_waits_for_are_not_kept(self):
        for number in range(300):
            self.put(f"k{number}", "x")
            self.get(f"k{number}")
            self.one.get("0", "1", f"none{number}")
            self.one._node.discard(self.one._node.begin_get(self.zero._node.name, f"v/{number}"))
        for connector in (self.zero, self.one):
            node = connector._node
            for kept in (node._taken, node._unwanted, node._notices):
                until(lambda kept=kept: not kept, f"{len(kept)} are kept")
        until(lambda: self.zero.health()["values"] == 0, "what was taken is kept")

    def test_connectors_of_a_stage_share_a_node_and_the_last_one_stops_it(self):
        other = self.connector(0)
        self.assertEqual(other.health()["node"], self.zero.health()["node"])
        self.zero.close()
        self.zero.close()
        self.assertEqual(self.zero.health()["status"], "unhealthy")
        with self.assertRaisesRegex(TroupeError, "it was closed"):
            self.zero.put("0", "1", "k", "x")
        self.zero.reap_consumed()  # from a thread of vLLM-Omni's that is new to the connector
        self.assertFalse(self.zero.cleanup("k"))
        self.put("k", "x", connector=other)
        self.assertEqual(self.get("k")[0], "x")
        other.close()
        self.assertNotEqual(self.connector(0).health()["node"], other.health().get("node"))

    def test_garbage_is_closed_whatever_its_thread_holds(self):
        other = self.connector(0)
        node = other._node

        def collects():
            with node_module._lock:
                other.__del__()  # as the collector of cycles calls it

        thread = threading.Thread(target=collects, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        self.assertFalse(thread.is_alive(), "it waits for a lock that its own thread holds")
        until(lambda: other._node is None, "it is not closed")
        until(lambda: node.users == 1, "its node counts it")

    def test_health_says_who_the_node_is_and_what_it_has(self):
        self.put("r_0_0", bytes(100_000))
        said = self.zero.health()
        self.assertEqual((said["status"], said["values"], said["values_bytes"]), ("healthy", 1, 100_000))
        self.assertEqual((said["puts"], said["supervisor"], said["memory_bytes"]), (1, True, 16 * MIB))
        self.get("r_0_0")
        json.dumps(self.one.health())
        self.assertIn(said["node"], [link["peer"] for link in self.one.health()["links"]])

    def test_a_forked_process_is_told_to_make_its_own(self):
        child = os.fork()
        if child == 0:
            try:
                self.zero.put("0", "1", "k", "x")
            except TroupeError as error:
                os._exit(0 if error.code == ErrorCode.ABORTED and "after the fork" in error.reason else 1)
            os._exit(2)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.put("k", "x")
        self.assertEqual(self.get("k")[0], "x")

    def test_many_threads_put_and_get_at_once(self):
        def work(number):
            for turn in range(40):
                key, data = f"r{number}_0_{turn}", payload(stages.KINDS[turn % len(stages.KINDS)], turn)
                self.zero.put("0", "1", key, data)
                got = self.get(key)
                if got is None or digest(got[0]) != digest(data):
                    wrong.append(key)

        wrong = []
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        self.assertEqual(wrong, [])


class VllmOmni(unittest.TestCase):
    """Connectors as vLLM-Omni makes them: by name, from its YAML."""

    def test_the_plugin_may_be_loaded_again_and_makes_the_connector(self):
        for _ in range(2):
            troupe.omni.register()
        made = OmniConnectorFactory.create_connector(ConnectorSpec("TroupeOmniConnector", {**SMALL, "stage_id": 0}))
        self.addCleanup(made.close)
        self.assertIsInstance(made, TroupeOmniConnector)
        self.assertEqual((made.stage_id, made.supports_raw_data), (0, True))
        with self.assertRaisesRegex(ValueError, "did you mean 'memory'"):
            OmniConnectorFactory.create_connector(ConnectorSpec("TroupeOmniConnector", {"memroy": 1}))

    def test_a_plugin_of_another_release_says_so_and_raises_nothing(self):
        with unittest.mock.patch.dict(sys.modules, {"vllm_omni.distributed.omni_connectors.factory": None}):
            with self.assertLogs("vllm.troupe.omni", "ERROR") as said:
                troupe.omni.register()
        self.assertIn("it needs vLLM-Omni 0.30, and registering it failed", said.output[-1])

    def test_the_entry_points_name_what_is_there(self):
        """The other tests do not need the package installed."""
        settings = tomllib.loads((pathlib.Path(troupe.__file__).parents[1] / "pyproject.toml").read_text())
        for group, function in (("vllm.general_plugins", troupe.plugins.vllm),
                                ("vllm_omni.general_plugins", troupe.plugins.vllm_omni)):
            name = settings["project"]["entry-points"][group]["troupe"]
            self.assertIs(importlib.metadata.EntryPoint("troupe", name, group).load(), function)
        troupe.plugins.vllm_omni()
        self.assertIn("TroupeOmniConnector", OmniConnectorFactory.list_registered_connectors())
        with self.assertLogs("vllm.troupe.plugins", "WARNING") as said:
            troupe.plugins.vllm()  # vLLM 0.30 comes with vLLM-Omni
        self.assertRegex(said.output[0], "TroupeConnector is not available: .* 0.32")

    def test_any_graph_of_stages_is_served_from_one_yaml(self):
        troupe.omni.register()
        graph = {("0", "1"), ("0", "2"), ("1", "3"), ("2", "3")}  # two ways from the first stage to the last
        config = {"runtime": {"connectors": {"c": {"name": "TroupeOmniConnector", "extra": SMALL}}},
                  "stage_args": [{"stage_id": stage,
                                  "output_connectors": {f"to_stage_{to}": "c" for of, to in graph if of == str(stage)},
                                  "input_connectors": {f"from_stage_{of}": "c" for of, to in graph if to == str(stage)}}
                                 for stage in range(4)]}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump(config, file)
            file.flush()
            made = create_connectors_from_config(load_omni_transfer_config(file.name).connectors)
        for connector in made.values():
            self.addCleanup(connector.close)
        self.assertEqual(set(made), graph)
        for of, to in sorted(graph):
            self.assertTrue(made[of, to].put(of, to, "r", f"{of} to {to}")[0])
        for of, to in sorted(graph):
            self.assertEqual(made[of, to].get(of, to, "r")[0], f"{of} to {to}")

    def test_a_kv_cache_of_vllm_omni_arrives_as_it_was_packed(self):
        zero, one = (TroupeOmniConnector({**SMALL, "stage_id": stage}) for stage in range(2))
        for connector in (zero, one):
            self.addCleanup(connector.close)
        layers = {"key_cache": [torch.rand(8, 4, 64).bfloat16() for _ in range(4)],
                  "value_cache": [torch.rand(8, 4, 64).bfloat16() for _ in range(4)]}
        raw = KVCacheTransferData("r", layers, [3, 1, 2], {"kv_lens": [24]}).to_bytes()
        self.assertTrue(zero.put("0", "1", "omni_0_to_1_kv_cache_r", raw)[0])
        got, size = one.get_with_deadline("0", "1", "omni_0_to_1_kv_cache_r", deadline=time.monotonic() + 10)
        self.assertEqual(size, len(raw))
        there = KVCacheTransferData.from_bytes(memoryview(got.tensor.numpy()))
        for cache, tensors in layers.items():
            for expected, found in zip(tensors, there["layer_blocks"][cache], strict=True):
                self.assertTrue(torch.equal(expected, found))


class Processes(unittest.TestCase):
    """Each stage in a process of its own, which may be killed."""

    def start(self, stage_id, **extra):
        stage = Stage(stage_id, **{**SMALL, **extra})
        self.addCleanup(stage.kill)
        return stage

    def test_three_stages_hand_on_thousands_of_payloads_and_lose_none(self):
        count = 2000
        first, last = self.start(0), self.start(2)
        middle = [self.start(1), self.start(1)]
        before = [stage.run(stages.memory_used) for stage in (first, *middle, last)]
        halves = [list(range(0, count, 2)), list(range(1, count, 2))]
        last.begin(stages.consume, "r", list(range(count)), PATIENCE)  # looks before there is anything
        for stage, half in zip(middle, halves, strict=True):
            stage.begin(stages.pass_on, "r", half, PATIENCE)
        first.run(stages.produce, 1, "r", range(count))
        for stage, half in zip(middle, halves, strict=True):
            self.assertEqual(sorted(stage.end()), half)
        self.assertEqual(last.end(), ([], []))
        for stage, used in zip((first, *middle, last), before, strict=True):
            # Notices of where a payload is stay for a minute.
            until(lambda stage=stage, used=used: stage.run(stages.memory_used) <= used + 64 * 3 * count,
                  lambda stage=stage, used=used: f"memory was not given back: {stage.name} "
                  f"has {stage.run(stages.memory_used)} bytes of what were {used}")
        for stage in (first, *middle, last):
            self.assertEqual(stage.run(stages.named_memory), [])
            stage.leave()

    def test_of_two_readers_one_gets_each(self):
        first, readers = self.start(0), [self.start(1), self.start(1)]
        for number, reader in enumerate(readers):  # any reader could get all of them
            first.run(stages.put, 1, f"own_{number}", "x")
            self.assertEqual(reader.run(stages.get, 0, f"own_{number}", 10.0)[0], digest("x"))
        keys = [f"r_0_{number}" for number in range(200)]
        taken = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "taken"
        for reader in readers:
            reader.begin(stages.race, 0, keys, taken)
        for number, key in enumerate(keys):
            first.run(stages.put, 1, key, bytes(40_000) if number % 2 else "x")
        got = [reader.end() for reader in readers]
        self.assertEqual(sorted(got[0] + got[1]), sorted(keys))

    def test_a_killed_stage_is_no_hang_and_its_successor_serves_the_same_keys(self):
        doomed, other, reader = self.start(0), self.start(0), self.start(1)
        doomed.run(stages.put, 1, "doomed", bytes(100_000))
        other.run(stages.put, 1, "other", "x")
        self.assertIsNone(reader.run(stages.get, 0, "nothing")[0])  # the reader has links with both
        doomed.kill()
        found, seconds = reader.run(stages.get, 0, "doomed", 1.0)
        self.assertIsNone(found)
        self.assertLess(seconds, 3.0)
        self.assertEqual(reader.run(stages.get, 0, "other", 10.0)[0], digest("x"))
        successor = self.start(0)
        successor.run(stages.put, 1, "doomed", b"again")
        self.assertEqual(reader.run(stages.get, 0, "doomed", 10.0)[0], digest(b"again"))

    def test_a_stage_that_stands_still_holds_nobody_up_and_is_heard_when_it_goes_on(self):
        still, other, reader = self.start(0), self.start(0), self.start(1)
        still.run(stages.put, 1, "still", bytes(200_000))
        self.assertIsNone(reader.run(stages.get, 0, "nothing")[0])
        still.signal(signal.SIGSTOP)
        try:
            other.run(stages.put, 1, "other", "x")
            self.assertEqual(reader.run(stages.get, 0, "other", 10.0)[0], digest("x"))
            found, seconds = reader.run(stages.get, 0, "still", 0.5)
            self.assertIsNone(found)
            self.assertLess(seconds, 1.5)
            until(lambda: reader.run(stages.get, 0, "still", 0.2) and
                  reader.run(stages.health)["status"] == "degraded", "health does not tell of it")
            self.assertIn(still.name, reader.run(stages.health)["reason"])
        finally:
            still.signal(signal.SIGCONT)
        self.assertEqual(reader.run(stages.get, 0, "still", 30.0)[0], digest(bytes(200_000)))

    def test_a_reader_that_is_killed_while_it_waits_leaves_the_payload_for_another(self):
        first, doomed = self.start(0), self.start(1)
        doomed.begin(stages.get, 0, "k", PATIENCE)
        time.sleep(0.3)
        doomed.signal(signal.SIGSTOP)
        first.run(stages.put, 1, "k", bytes(200_000))
        doomed.kill()
        self.assertEqual(self.start(1).run(stages.get, 0, "k", 20.0)[0], digest(bytes(200_000)))

    def test_without_a_supervisor_stages_go_on_and_begin_the_next_one(self):
        first, reader = self.start(0), self.start(1)
        notice = pathlib.Path(os.environ["XDG_STATE_HOME"]) / "troupe/omni/supervisor"
        pid = json.loads(notice.read_text())["pid"]
        os.kill(pid, signal.SIGKILL)
        first.run(stages.put, 1, "k", "x")
        self.assertEqual(reader.run(stages.get, 0, "k", 10.0)[0], digest("x"))
        until(lambda: notice.read_text() and json.loads(notice.read_text())["pid"] != pid, "no other one is begun")
        until(lambda: reader.run(stages.health)["supervisor"], "it is not found")
        late = self.start(2)
        reader.run(stages.put, 2, "l", "y")
        self.assertEqual(late.run(stages.get, 1, "l", 10.0)[0], digest("y"))

    def test_the_deployment_of_the_page_joins_stages_under_tls(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        troupe_command = os.environ["TROUPE_COMMAND"]
        subprocess.run([troupe_command, "certs", "init", folder / "keys", "--cluster", "omni"], check=True,
                       stdout=subprocess.DEVNULL)
        page = (pathlib.Path(__file__).resolve().parents[2] / "docs/omni.md").read_text()
        [text] = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if block.startswith("cluster:")]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        text = text.replace("/etc/troupe/omni", str(folder / "keys")).replace("node-a.example.org", "127.0.0.1")
        file = folder / "omni.yaml"
        file.write_text(text.replace("7400", str(port)).replace("1GiB", "16MiB"))
        supervisor = subprocess.Popen([troupe_command, "node", file, "--name", "supervisor"], stdout=subprocess.DEVNULL,
                                      stderr=subprocess.DEVNULL)
        self.addCleanup(supervisor.wait)
        self.addCleanup(supervisor.terminate)
        first, reader = (Stage(stage, deployment=str(file)) for stage in range(2))
        self.addCleanup(first.kill)
        self.addCleanup(reader.kill)
        until(lambda: reader.run(stages.health)["supervisor"], "the supervisor is not found")
        first.run(stages.put, 1, "k", bytes(200_000))
        self.assertEqual(reader.run(stages.get, 0, "k", 20.0)[0], digest(bytes(200_000)))
        self.assertEqual(reader.run(stages.health)["memory_bytes"], 16 * MIB)

    def test_a_deployment_that_has_no_stage_for_it_is_refused_by_name(self):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write("cluster: c\nsupervisor: {port: 0, begin: true}\n"
                       "stages: [{name: other, role: store, pool: {size: 1MiB}}]\n")
            file.flush()
            with self.assertRaisesRegex(TroupeError, "omni"):
                TroupeOmniConnector({"stage_id": 0, "deployment": file.name})


def end_supervisors(state):
    """Supervisors that were started on demand outlive the tests."""
    for notice in state.glob("troupe/*/supervisor"):
        with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
            os.kill(json.loads(notice.read_text())["pid"], signal.SIGTERM)


if __name__ == "__main__":
    command, library = (str(pathlib.Path(path).resolve()) for path in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as own:  # supervisors leave state files of their clusters
        os.environ.update(TROUPE_COMMAND=command, TROUPE_LIBRARY=library, XDG_STATE_HOME=own)
        Stage.nursery = Nursery(stages.serve)
        configure_logging(level="error")
        try:
            unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
        finally:
            end_supervisors(pathlib.Path(own))
