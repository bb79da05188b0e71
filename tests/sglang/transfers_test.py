"""Troupe's transfer backend for SGLang: scheduler processes with SGLang's own classes and host memory. Every byte
is compared.

Run by ctest, sglang.transfers, with the paths of the troupe command and of libtroupe.so.0.
"""
import contextlib
import itertools
import json
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

import scheduler as sglang
from nursery import PATIENCE, Failure, Nursery, Process
from scheduler import BOOTSTRAPPING, FAILED, SUCCESS, WAITING, until


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """The scheduler processes of one server, one for each rank, and its bootstrap server in the first one."""

    def __init__(self, test, mode, *, tp=1, pp=1, together=False, processes=None, bootstrap=None, **model):
        self.mode, self.tp, self.pp = mode, tp, pp
        self.bootstrap = bootstrap or free_port()
        self.http = free_port()
        self.address = f"127.0.0.1:{self.bootstrap}"
        self.names = [f"{mode} {part}.{rank}" for part in range(pp) for rank in range(tp)]
        if processes is None:
            count = 1 if together else tp * pp
            processes = [test.process() for _ in range(count)]
        self.processes = processes
        self.at = dict(zip(self.names, itertools.cycle(processes)))
        if mode == "prefill":
            processes[0].run(sglang.serve_bootstrap, self.bootstrap)
        def group(rank):
            return str(pathlib.Path(test.folder) / f"group-{self.http}-{rank}") if pp > 1 else None

        for number, name in enumerate(self.names):
            self.at[name].begin(sglang.start, name, mode, model=model, folder=test.folder, http=self.http,
                                bootstrap=self.bootstrap, tp=(number % tp, tp), pp=(number // tp, pp),
                                group=group(number % tp))
            if together:
                self.nodes = self.at[name].end()
        if not together:
            self.nodes = [self.at[name].end() for name in self.names]

    def run(self, function, *arguments, **named):
        """Runs it at each rank, in turn."""
        return [self.at[name].run(function, name, *arguments, **named) for name in self.names]

    def first(self, function, *arguments, **named):
        return self.at[self.names[0]].run(function, self.names[0], *arguments, **named)

    def poll(self, room):
        """The status as SGLang computes it: the least of all ranks."""
        return min(self.run(sglang.poll, room))

    def kill(self):
        for process in self.processes:
            process.kill()


class Transfers(unittest.TestCase):
    rooms = itertools.count(1000)

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.room = next(self.rooms)

    def pair(self, prefill=None, decode=None, **model):
        return (Server(self, "prefill", **{**model, **(prefill or {})}), Server(self, "decode", **{**model, **(decode or {})}))

    def process(self, **environment):
        process = Process()
        self.addCleanup(process.kill)
        process.run(sglang.environment, **environment)
        return process

    def pair_of_deployment(self, file):
        settings = json.dumps({"deployment": str(file)})
        return (Server(self, mode, processes=[self.process(TROUPE_SGLANG=settings)]) for mode in ("prefill", "decode"))

    # -- what SGLang's loops do, step by step

    def init(self, prefill, decode, room):
        """Goes on until every receiver knows the prefill server."""
        decode.run(sglang.begin, room, prefill.address)
        for name in decode.names:
            until(lambda name=name: decode.at[name].run(sglang.ensure, name, prefill.address), "the prefill is not ready")
        decode.run(sglang.init, room)

    def meet(self, prefill, decode, room, tokens, prefix=0, states=None, sender_first=True):
        """Goes on until the sender waits for input. Returns the prefix that the sender was told."""
        if sender_first:  # None: there is a sender already
            prefill.run(sglang.begin, room, prefill.address)
        self.init(prefill, decode, room)
        self.assertEqual(decode.run(sglang.poll, room), [WAITING] * len(decode.names))
        decode.run(sglang.ask, room, tokens, prefix, states)
        if sender_first is False:
            prefill.run(sglang.begin, room, prefill.address)
        until(lambda: prefill.poll(room) == WAITING, "the sender hears of no receiver")
        self.assertEqual(decode.run(sglang.poll, room), [WAITING] * len(decode.names))
        return prefill.run(sglang.finalize, room, tokens)

    def end(self, prefill, decode, room, states=None):
        until(lambda: prefill.poll(room) == SUCCESS, "the sender does not end")
        until(lambda: decode.poll(room) == SUCCESS, "the receiver does not end")
        self.assertEqual(decode.run(sglang.check, room), [[]] * len(decode.names))
        if states is not None:
            self.assertEqual(decode.run(sglang.wrong_states, room, states), [[]] * len(decode.names))

    def transfer(self, prefill, decode, room, tokens, prefix=0, chunks=(), states=None, **more):
        told = self.meet(prefill, decode, room, tokens, prefix, states and states[1], **more)
        for upto in chunks:
            prefill.run(sglang.send, room, upto)
        prefill.run(sglang.send, room, tokens, last=True, states=states and states[0])
        self.end(prefill, decode, room, states and states[1])
        for server in (prefill, decode):
            server.run(sglang.clear, room)
        return told

    def assert_fails(self, server, room, said, seconds=PATIENCE):
        until(lambda: server.poll(room) == FAILED, f"the {server.mode} server hears nothing", seconds)
        self.assertRegex(server.first(sglang.failure, room)[1], said)

    def assert_nothing_is_left(self, *servers):
        for server in servers:
            for name in server.names:
                until(lambda server=server, name=name: not any(server.at[name].run(sglang.state_of, name).values()),
                      f"{name} keeps {server.at[name].run(sglang.state_of, name)}")


class Bytes(Transfers):
    """Compares every byte of every page, head and layer with what was computed."""

    def test_a_request_in_one_chunk_and_in_many(self):
        prefill, decode = self.pair()
        self.transfer(prefill, decode, self.room, 100)
        self.transfer(prefill, decode, next(self.rooms), 100, chunks=(30, 64, 70))
        self.transfer(prefill, decode, next(self.rooms), 96, chunks=(16, 32, 33))  # the last chunk ends with a page
        self.transfer(prefill, decode, next(self.rooms), 1)
        self.assert_nothing_is_left(prefill, decode)

    def test_a_byte_that_is_wrong_is_noticed_by_this_test(self):
        prefill, decode = self.pair()
        self.meet(prefill, decode, self.room, 40)
        prefill.run(sglang.send, self.room, 40, last=True, flip=17)
        until(lambda: decode.poll(self.room) == SUCCESS, "the receiver does not end")
        [found] = decode.run(sglang.check, self.room)
        self.assertEqual(found, [(layer, plane, 1) for plane in ("keys", "values") for layer in range(4)])

    def test_a_chunk_moves_when_it_is_computed(self):
        prefill, decode = self.pair()
        self.meet(prefill, decode, self.room, 100)
        for upto in (32, 80):
            prefill.run(sglang.send, self.room, upto)
            until(lambda upto=upto: decode.first(sglang.check_first, self.room, upto) == [], "it waits for the last chunk")
        self.assertEqual(decode.poll(self.room), WAITING)
        prefill.run(sglang.send, self.room, 100, last=True)
        self.end(prefill, decode, self.room)

    def test_caches_of_all_kinds(self):
        for model in ({"kind": "mla", "head_bytes": 1152}, {"dtype": "fp8_e4m3", "head_bytes": 16, "value_bytes": 16},
                      {"value_bytes": 48}, {"page_size": 1, "pages": 200}, {"page_size": 64, "pages": 12},
                      {"drafts": 1}, {"kind": "mla", "drafts": 1}):
            with self.subTest(**model):
                prefill, decode = self.pair(**model)
                self.transfer(prefill, decode, next(self.rooms), 150, chunks=(70,))
                prefill.kill()
                decode.kill()

    def test_unequal_tensor_parallel_sizes(self):
        for theirs, own, model in ((1, 2, {}), (2, 1, {}), (2, 2, {}), (4, 2, {"heads": 2}), (1, 4, {"heads": 2}),
                                   (2, 1, {"kind": "mla"}), (1, 2, {"kind": "mla"})):
            with self.subTest(prefill=theirs, decode=own, **model):
                prefill, decode = self.pair({"tp": theirs}, {"tp": own}, **model)
                told = self.transfer(prefill, decode, next(self.rooms), 100, chunks=(48,), prefix=32)
                self.assertLessEqual(set(told), {0, 32})  # 0: from a rank that has nothing to send
                self.assertIn(32, told)
                self.assert_nothing_is_left(prefill, decode)
                prefill.kill()
                decode.kill()

    def test_heads_are_those_that_sglang_slices(self):
        process = self.process()
        for heads, theirs, own in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
            self.assertEqual(process.run(sglang.unlike_sglang, heads, theirs, own), [], f"{heads} heads, {theirs} to {own}")

    def test_unequal_page_sizes(self):
        for theirs, own in ((16, 64), (64, 16), (1, 16), (16, 1)):
            with self.subTest(prefill=theirs, decode=own):
                prefill, decode = self.pair({"page_size": theirs, "pages": 1024 // theirs},
                                            {"page_size": own, "pages": 1024 // own})
                for tokens, prefix in ((100, 0), (128, 0), (100, 64), (130, 16 if own <= 16 else 64)):
                    [told] = self.transfer(prefill, decode, next(self.rooms), tokens, prefix=prefix, chunks=(tokens // 2,)
                                           if prefix < tokens // 2 else ())
                    self.assertEqual(told, prefix - prefix % theirs)
                prefill.kill()
                decode.kill()

    def test_unequal_pipelines(self):
        for theirs, own, more in (((2, 1), (1, 1), {}), ((2, 1), (2, 1), {}), ((1, 1), (2, 1), {}), ((2, 2), (1, 1), {}),
                                  ((3, 1), (2, 1), {"layers": 7}), ((2, 1), (1, 1), {"kind": "mla"})):
            with self.subTest(prefill=theirs, decode=own, **more):
                prefill, decode = self.pair({"pp": theirs[0], "tp": theirs[1]}, {"pp": own[0], "tp": own[1]}, **more)
                self.transfer(prefill, decode, next(self.rooms), 100, chunks=(48,), prefix=16)
                prefill.kill()
                decode.kill()

    def test_a_prefix_at_the_decode_server_does_not_move(self):
        prefill, decode = self.pair()
        for tokens, prefix in ((100, 0), (100, 48), (96, 96), (100, 96)):
            [told] = self.transfer(prefill, decode, next(self.rooms), tokens, prefix=prefix)
            self.assertEqual(told, prefix if prefix < tokens else 0)

    def test_many_requests_at_once(self):
        prefill, decode = self.pair(pages=512)
        rooms = [next(self.rooms) for _ in range(24)]
        for room in rooms:
            self.meet(prefill, decode, room, 20 + room % 37, sender_first=room % 2 == 0)
        for room in reversed(rooms):
            prefill.run(sglang.send, room, 20 + room % 37, last=True)
        for room in rooms:
            until(lambda room=room: decode.poll(room) == SUCCESS, "a receiver does not end")
            until(lambda room=room: prefill.poll(room) == SUCCESS, "a sender does not end")
        # Rooms that are far enough apart share rows of metadata; the row holds that of the last owner.
        wrong = [[one for one in decode.first(sglang.check, room) if one[0] != "row"] for room in rooms]
        self.assertEqual(wrong, [[]] * len(rooms))


class States(Transfers):
    """The state that a model keeps besides keys and values."""

    def test_recurrent_states_of_equal_and_unequal_sizes(self):
        for theirs, own, part in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (4, 2, 1)):
            with self.subTest(prefill=theirs, decode=own, parts=part):
                prefill, decode = self.pair({"tp": theirs, "pp": part}, {"tp": own}, states=("mamba",))
                for slots in ((3, 7), (0, 1)):
                    self.transfer(prefill, decode, next(self.rooms), 100, chunks=(48,),
                                  states=[{"mamba": [slot]} for slot in slots])
                self.assert_nothing_is_left(prefill, decode)
                prefill.kill()
                decode.kill()

    def test_recurrent_layers_beside_latents(self):
        for theirs, own in ((1, 2), (2, 1)):
            with self.subTest(prefill=theirs, decode=own):
                prefill, decode = self.pair({"tp": theirs}, {"tp": own}, kind="mla", hybrid=True, states=("mamba",))
                self.transfer(prefill, decode, next(self.rooms), 100, states=({"mamba": [3]}, {"mamba": [7]}))
                prefill.kill()
                decode.kill()

    def test_slices_of_states_are_those_of_sglang(self):
        process = self.process()
        for theirs, own in itertools.product((1, 2, 4), (1, 2, 4)):
            self.assertEqual(process.run(sglang.unlike_sglangs_states, theirs, own), [], f"{theirs} to {own}")

    def test_pages_of_windows(self):
        for theirs, own in ((1, 1), (2, 1), (1, 2)):
            with self.subTest(prefill=theirs, decode=own):
                prefill, decode = self.pair({"tp": theirs}, {"tp": own, "items": 17}, states=("swa",))
                self.transfer(prefill, decode, self.room, 100, states=({"swa": [5, 2, 9]}, {"swa": [1, 16, 3]}))
                self.transfer(prefill, decode, next(self.rooms), 100, states=({"swa": [4, 3, 8]}, {"swa": [6, 7]}))
                prefill.kill()
                decode.kill()

    def test_index_keys_lie_in_the_pages_of_the_cache(self):
        for theirs, own in ((1, 1), (2, 1), (1, 2)):
            with self.subTest(prefill=theirs, decode=own):
                prefill, decode = self.pair({"tp": theirs}, {"tp": own}, kind="mla", states=("dsa",))
                self.transfer(prefill, decode, next(self.rooms), 100, prefix=32, states=({}, {}))
                prefill.kill()
                decode.kill()

    def test_rows_of_other_components(self):
        prefill, decode = self.pair(states=("qsa_pending", "block_scale", "mamba"))
        for _ in range(2):
            self.transfer(prefill, decode, next(self.rooms), 60,
                          states=({"qsa_pending": [4], "block_scale": [3, 1, 2], "mamba": [5]},
                                  {"qsa_pending": [9], "block_scale": [11, 12, 13], "mamba": [2]}))

    def test_lists_of_unequal_length_fail_where_they_have_to_be_equal(self):
        prefill, decode = self.pair(states=("qsa_pending",))
        self.meet(prefill, decode, self.room, 60, states={"qsa_pending": [4]})
        prefill.run(sglang.send, self.room, 60, last=True, states={"qsa_pending": [4, 5]})
        self.assert_fails(prefill, self.room, "asks for 1 indices of the state 'qsa_pending'.* has 2")
        self.assert_fails(decode, self.room, "asks for 1 indices")

    def test_a_component_that_is_not_moved_is_refused_by_name(self):
        for states, more, said in ((("dsa_tail",), {}, "'dsa_tail'"), (("swa",), {"pp": 2}, "'swa' between pipelines"),
                                   (("new_state",), {}, "'new_state'")):
            with self.assertRaisesRegex(Failure, f"Troupe does not move the state component {said}"):
                Server(self, "prefill", states=states, **more)


class Order(Transfers):
    """Either side may come first, and requests may begin again."""

    def test_the_receiver_may_be_first(self):
        prefill, decode = self.pair()
        self.transfer(prefill, decode, self.room, 40, sender_first=False)

    def test_a_sender_waits_for_every_rank_of_the_decode_server(self):
        prefill, decode = self.pair({}, {"tp": 2})
        prefill.run(sglang.begin, self.room, prefill.address)
        decode.run(sglang.begin, self.room, prefill.address)
        for name in decode.names:
            self.assertEqual(prefill.poll(self.room), BOOTSTRAPPING)
            until(lambda name=name: decode.at[name].run(sglang.ensure, name, prefill.address), "the prefill is not ready")
            decode.at[name].run(sglang.init, name, self.room)
            decode.at[name].run(sglang.ask, name, self.room, 60)
            until(lambda name=name: prefill.first(sglang.asked_by, self.room) == decode.names.index(name) + 1, "nobody asks")
        until(lambda: prefill.poll(self.room) == WAITING, "the sender hears of no receiver")

    def test_a_prompt_may_be_computed_before_anybody_asks(self):
        prefill, decode = self.pair()
        prefill.run(sglang.begin, self.room, prefill.address)
        prefill.run(sglang.compute, self.room, 60)
        self.assertEqual(prefill.poll(self.room), BOOTSTRAPPING)
        self.transfer(prefill, decode, self.room, 60, sender_first=None)

    def test_an_optimistic_prefill_that_yields_owns_nothing(self):
        prefill, decode = self.pair()
        prefill.run(sglang.begin, self.room, prefill.address)
        prefill.run(sglang.compute, self.room, 60)
        prefill.run(sglang.yield_pages, self.room)  # the same sender waits in the queue again
        self.assertEqual(prefill.poll(self.room), BOOTSTRAPPING)
        self.transfer(prefill, decode, self.room, 60, sender_first=None)

    def test_a_retracted_request_is_prefilled_again_by_the_same_room(self):
        prefill, decode = self.pair()
        for _ in range(3):
            self.transfer(prefill, decode, self.room, 60, sender_first=False)
        self.transfer(prefill, decode, self.room, 60)
        self.assert_nothing_is_left(prefill, decode)

    def test_a_room_that_was_aborted_is_used_again(self):
        prefill, decode = self.pair()
        for _ in range(3):
            self.meet(prefill, decode, self.room, 60)
            prefill.run(sglang.abort, self.room)
            until(lambda: decode.poll(self.room) == FAILED, "the receiver hears nothing")
            for server in (prefill, decode):
                server.run(sglang.failure, self.room)
                server.run(sglang.drop, self.room)
        self.transfer(prefill, decode, self.room, 60)

    def test_a_room_may_begin_again_before_its_end_is_over(self):
        prefill, decode = self.pair()
        prefill.run(sglang.begin_and_abort, self.room, prefill.address, 4)  # and once more
        self.transfer(prefill, decode, self.room, 60, sender_first=None)
        self.assert_nothing_is_left(prefill, decode)

    def test_a_request_that_begins_again_behind_its_first_chunk_fails_by_name(self):
        prefill, decode = self.pair()
        self.meet(prefill, decode, self.room, 60)
        prefill.run(sglang.send, self.room, 32)
        prefill.run(sglang.finalize, self.room, 60)
        self.assertEqual(prefill.poll(self.room), FAILED)
        self.assertIn("began again", prefill.first(sglang.failure, self.room)[1])
        until(lambda: decode.poll(self.room) == FAILED, "the receiver hears nothing")


class Lifecycle(Transfers):
    """One sender and one receiver, as in SGLang's own tests of its classes."""

    def test_a_last_chunk_without_pages_brings_metadata_and_states(self):
        prefill, decode = self.pair({"tp": 2}, {"tp": 1}, states=("mamba",))
        self.transfer(prefill, decode, self.room, 96, prefix=96, states=({"mamba": [3]}, {"mamba": [7]}))
        self.meet(prefill, decode, room := next(self.rooms), 96, states={"mamba": [6]})
        prefill.run(sglang.send, room, 90)  # five pages
        prefill.run(sglang.send_pages, room, [1])
        self.assertEqual(prefill.run(sglang.poll, room), [FAILED] * 2)  # the state is missing
        self.assertIn("one slot, and 0 were named", prefill.first(sglang.failure, room)[1])

    def test_a_context_parallel_rank_that_sends_nothing_ends_with_the_last_chunk(self):
        prefill, _ = self.pair()
        prefill.run(sglang.be_dummy)
        prefill.run(sglang.begin, self.room, prefill.address)
        self.assertEqual(prefill.poll(self.room), WAITING)
        prefill.run(sglang.finalize, self.room, 60)
        prefill.run(sglang.send, self.room, 32)
        self.assertEqual(prefill.poll(self.room), WAITING)
        prefill.run(sglang.send, self.room, 60, last=True)
        self.assertEqual(prefill.poll(self.room), SUCCESS)
        self.assertEqual(prefill.first(sglang.state_of)["sends"], 0)

    def test_an_event_is_of_one_chunk_and_is_waited_for_where_the_library_has_no_gpu(self):
        prefill, decode = self.pair()
        self.meet(prefill, decode, self.room, 60)
        self.assertEqual(prefill.first(sglang.send_behind_event, self.room, 16), (1, None, 1))
        prefill.run(sglang.send, self.room, 60, last=True)
        self.end(prefill, decode, self.room)

    def test_a_room_that_is_unknown_is_failed_and_stays_unknown(self):
        prefill, _ = self.pair()
        prefill.run(sglang.begin, self.room, prefill.address)
        self.assertFalse(prefill.first(sglang.lose_room, self.room))
        self.assertEqual(prefill.poll(self.room), FAILED)
        self.assertEqual(prefill.first(sglang.failure, self.room)[2], True)  # the reason is another rank's
        self.assert_nothing_is_left(prefill)

    def test_an_outcome_stays_and_a_reason_is_told_once(self):
        prefill, decode = self.pair()
        self.meet(prefill, decode, self.room, 60)
        prefill.run(sglang.send, self.room, 60, last=True)
        self.end(prefill, decode, self.room)
        for server in (prefill, decode):
            server.run(sglang.clear_only, self.room)
            self.assertEqual(server.poll(self.room), SUCCESS)
        self.meet(prefill, decode, room := next(self.rooms), 60)
        prefill.run(sglang.abort, room)
        self.assertEqual([prefill.first(sglang.failure, room)[1:] for _ in range(2)],
                         [("Aborted by AbortReq.", False), ("Failed due to an unknown reason from another rank", True)])

    def test_memory_of_the_host_is_no_destination(self):
        prefill, decode = self.pair()
        self.init(prefill, decode, self.room)
        self.assertIn("receives only into the KV cache of the device", decode.first(sglang.ask_for_host_memory, self.room))

    def test_data_parallel_replicas_are_told_apart(self):
        processes = [self.process(), self.process()]
        ports = {"http": free_port(), "bootstrap": free_port()}
        address = f"127.0.0.1:{ports['bootstrap']}"
        decode = Server(self, "decode")
        processes[0].run(sglang.serve_bootstrap, ports["bootstrap"])
        for number, process in enumerate(processes):
            process.run(sglang.start, "prefill", "prefill", model={}, folder=self.folder, dp=(number, 2), **ports)
        until(lambda: decode.first(sglang.ensure, address), "the prefill is not ready")
        for room in (next(self.rooms), next(self.rooms)):
            rank = decode.first(sglang.resolve_dp, room, address)
            self.assertEqual(rank, room % 2)
            processes[rank].run(sglang.begin, "prefill", room, address)
            decode.run(sglang.begin, room, address)
            decode.run(sglang.init, room, rank)
            decode.run(sglang.ask, room, 60)
            until(lambda rank=rank, room=room: processes[rank].run(sglang.poll, "prefill", room) == WAITING, "nobody asks")
            processes[rank].run(sglang.finalize, "prefill", room, 60)
            processes[rank].run(sglang.send, "prefill", room, 60, last=True)
            until(lambda room=room: decode.poll(room) == SUCCESS, "the receiver does not end")
            self.assertEqual(decode.first(sglang.check, room), [])


class Aborts(Transfers):
    """Aborts before, during and after bootstrap, at either side. Nothing is lost, and nothing is written late."""

    def setUp(self):
        super().setUp()
        self.prefill, self.decode = self.pair({"tp": 2}, {"tp": 1})

    def goes_on(self):
        """Expects the next request to succeed, and nothing to be kept of the previous one."""
        self.transfer(self.prefill, self.decode, next(self.rooms), 60, chunks=(32,))
        self.assert_nothing_is_left(self.prefill, self.decode)

    def ends(self, server, *said, other=False):
        """Expects a failed room to end in SGLang's way, with one of these words."""
        until(lambda: server.poll(self.room) == FAILED, f"the {server.mode} server hears nothing")
        heard = server.run(sglang.failure, self.room)
        self.assertTrue(any(words in reason for words in said for _, reason, _ in heard), heard)
        self.assertEqual({kind for kind, _, _ in heard}, {"KVTransferError"})
        if not other:
            self.assertFalse(all(of_another for _, _, of_another in heard), heard)
        if server is self.decode:
            until(lambda: all(server.run(sglang.hold, self.room)), "peers may write for ever")
            server.run(sglang.poison, self.room)
        server.run(sglang.drop, self.room)

    def test_at_the_decode_server_before_it_knows_the_prefill(self):
        self.prefill.run(sglang.begin, self.room, self.prefill.address)
        self.decode.run(sglang.begin, self.room, self.prefill.address)
        self.decode.run(sglang.abort, self.room)
        self.ends(self.prefill, "nobody wants it")
        self.ends(self.decode, "AbortReq")
        self.goes_on()

    def test_at_the_decode_server_before_the_request_is_prefilled(self):
        self.init(self.prefill, self.decode, self.room)
        self.decode.run(sglang.abort, self.room)
        self.ends(self.decode, "AbortReq")
        self.prefill.run(sglang.begin, self.room, self.prefill.address)
        self.ends(self.prefill, "nobody wants it")
        self.goes_on()

    def test_at_the_decode_server_of_a_room_that_was_delivered_before(self):
        self.transfer(self.prefill, self.decode, self.room, 60)
        self.decode.run(sglang.begin, self.room, self.prefill.address)
        self.decode.run(sglang.init, self.room)
        self.decode.run(sglang.abort, self.room)
        self.ends(self.decode, "AbortReq")
        self.prefill.run(sglang.begin, self.room, self.prefill.address)
        self.ends(self.prefill, "nobody wants it")
        self.goes_on()

    def test_at_the_decode_server_when_it_has_asked(self):
        self.init(self.prefill, self.decode, self.room)
        self.decode.run(sglang.ask, self.room, 60)
        self.decode.run(sglang.abort, self.room)
        self.ends(self.decode, "AbortReq")
        self.prefill.run(sglang.begin, self.room, self.prefill.address)
        self.ends(self.prefill, "")
        self.goes_on()

    def test_at_the_decode_server_between_chunks(self):
        self.meet(self.prefill, self.decode, self.room, 60)
        self.prefill.run(sglang.send, self.room, 32)
        self.decode.run(sglang.abort, self.room)
        self.ends(self.decode, "AbortReq")
        # By the end of its receive or by the release of the request, whichever comes first.
        self.ends(self.prefill, "AbortReq", "nobody wants it")
        self.goes_on()

    def test_at_the_decode_server_after_the_last_chunk(self):
        self.meet(self.prefill, self.decode, self.room, 60)
        self.prefill.run(sglang.send, self.room, 60, last=True)
        until(lambda: self.decode.poll(self.room) == SUCCESS, "the receiver does not end")
        self.decode.run(sglang.abort, self.room)
        until(lambda: self.prefill.poll(self.room) == SUCCESS, "the sender does not end")
        self.prefill.run(sglang.clear, self.room)
        self.decode.run(sglang.failure, self.room)
        self.decode.run(sglang.drop, self.room)
        self.goes_on()

    def test_at_the_prefill_server_before_anybody_asks(self):
        self.prefill.run(sglang.begin, self.room, self.prefill.address)
        self.prefill.run(sglang.abort, self.room)
        self.ends(self.prefill, "AbortReq")
        self.init(self.prefill, self.decode, self.room)
        self.decode.run(sglang.ask, self.room, 60)
        self.ends(self.decode, "AbortReq")
        self.goes_on()

    def test_at_the_prefill_server_when_it_was_asked(self):
        self.meet(self.prefill, self.decode, self.room, 60)
        self.prefill.run(sglang.abort, self.room)
        self.ends(self.prefill, "AbortReq")
        self.ends(self.decode, "AbortReq")
        self.goes_on()

    def test_at_the_prefill_server_between_chunks(self):
        self.meet(self.prefill, self.decode, self.room, 60)
        self.prefill.run(sglang.send, self.room, 32)
        self.prefill.run(sglang.abort, self.room)
        self.ends(self.prefill, "AbortReq")
        self.ends(self.decode, "AbortReq")
        self.goes_on()

    def test_at_the_prefill_server_that_never_speaks_of_the_request_again(self):
        # As SGLang aborts what waits behind other prompts, or whose forward runs: no poll, no reason, no clear.
        self.meet(self.prefill, self.decode, self.room, 60)
        self.prefill.run(sglang.abort, self.room)
        self.ends(self.decode, "AbortReq")
        for name in self.prefill.names:
            until(lambda name=name: self.prefill.at[name].run(sglang.state_of, name)["sends"] == 0, "its sends are kept")
        self.ends(self.prefill, "AbortReq")
        self.goes_on()

    def test_of_one_rank_of_two_is_of_all(self):
        self.meet(self.prefill, self.decode, self.room, 60)
        self.prefill.run(sglang.send, self.room, 32)
        first, second = self.prefill.names
        self.prefill.at[second].run(sglang.abort, second, self.room)
        self.ends(self.decode, "AbortReq")
        until(lambda: self.prefill.poll(self.room) == FAILED, "the other rank goes on")
        heard = self.prefill.at[first].run(sglang.failure, first, self.room)
        self.assertEqual(heard[0], "KVTransferError")
        self.prefill.at[second].run(sglang.failure, second, self.room)
        self.prefill.run(sglang.drop, self.room)
        self.goes_on()

    def test_what_sglang_drops_at_one_rank_is_given_up(self):
        self.meet(self.prefill, self.decode, self.room, 60)
        first, second = self.prefill.names
        self.prefill.at[first].run(sglang.failure, first, self.room)  # it has heard from another rank
        self.ends(self.decode, "another rank of the prefill server failed")
        self.prefill.at[second].run(sglang.failure, second, self.room)
        self.prefill.run(sglang.drop, self.room)
        self.goes_on()

    def test_pages_are_kept_while_a_peer_may_write(self):
        for aborted in (True, False):
            self.room = next(self.rooms)
            self.decode.run(sglang.withhold_unpinned)
            self.meet(self.prefill, self.decode, self.room, 120)
            self.prefill.run(sglang.send, self.room, 64)
            if aborted:
                self.decode.run(sglang.abort, self.room)
            else:
                self.prefill.run(sglang.send, self.room, 120, last=True)
            until(lambda: self.decode.first(sglang.withheld), "it has no end")
            if aborted:
                self.assertEqual(self.decode.run(sglang.hold, self.room), [False])
                self.decode.run(sglang.failure, self.room)  # SGLang reads the reason before it asks about the pages
                self.assertEqual(self.decode.run(sglang.hold, self.room), [False])
                self.decode.run(sglang.hand_over_unpinned)
                self.assertEqual(self.decode.run(sglang.hold, self.room), [True])
            else:
                self.assertEqual(self.decode.poll(self.room), WAITING)
                self.decode.run(sglang.hand_over_unpinned)
                self.assertEqual(self.decode.poll(self.room), SUCCESS)

    def test_a_receive_is_forgotten_whose_end_comes_after_sglang_has_asked_for_the_last_time(self):
        self.decode.run(sglang.withhold_unpinned)
        self.meet(self.prefill, self.decode, self.room, 120)
        self.prefill.run(sglang.send, self.room, 64)
        self.decode.run(sglang.abort, self.room)
        until(lambda: self.decode.first(sglang.withheld), "it has no end")
        self.decode.run(sglang.failure, self.room)
        self.assertEqual(self.decode.run(sglang.hold, self.room), [False])
        self.decode.run(sglang.drop, self.room)
        self.ends(self.prefill, "AbortReq", "nobody wants it")
        self.decode.run(sglang.hand_over_unpinned)
        self.goes_on()

    def test_pages_are_not_written_after_they_are_given_back(self):
        rooms = [next(self.rooms) for _ in range(6)]
        for room in rooms:
            self.meet(self.prefill, self.decode, room, 120)
        for room in rooms:
            self.prefill.run(sglang.send, room, 120, last=True)
            self.decode.run(sglang.abort, room)
            until(lambda room=room: self.decode.first(sglang.hold, room), "peers may write for ever")
            self.decode.run(sglang.poison, room)
        for room in rooms:
            until(lambda room=room: self.prefill.poll(room) in (FAILED, SUCCESS), "a sender does not end")
        self.assertEqual([self.decode.first(sglang.is_poisoned, room) for room in rooms], [True] * len(rooms))


class Deaths(Transfers):
    """Peers that die, and peers that come back."""

    def restarted(self, server, **model):
        return Server(self, server.mode, tp=server.tp, bootstrap=server.bootstrap, **model)

    def fails(self, server, room, said):
        self.assert_fails(server, room, said, 20)
        if server.mode == "decode":
            until(lambda: server.first(sglang.hold, room), "peers may write for ever")
        server.run(sglang.drop, room)

    def test_of_a_prefill_server_between_chunks(self):
        prefill, decode = self.pair()
        self.meet(prefill, decode, self.room, 60)
        prefill.run(sglang.send, self.room, 32)
        prefill.kill()
        self.fails(decode, self.room, "peer_lost")
        self.assert_nothing_is_left(decode)
        prefill = self.restarted(prefill)
        self.transfer(prefill, decode, next(self.rooms), 60)

    def test_of_a_prefill_server_before_it_was_asked(self):
        prefill, decode = self.pair()
        self.transfer(prefill, decode, next(self.rooms), 60)
        decode.run(sglang.begin, self.room, prefill.address)
        decode.run(sglang.init, self.room)
        prefill.kill()
        self.fails(decode, self.room, f"{prefill.nodes[0][0]} of the prefill server is gone")
        prefill = self.restarted(prefill)
        self.transfer(prefill, decode, next(self.rooms), 60)
        self.assert_nothing_is_left(prefill, decode)

    def test_what_is_meant_for_a_former_life_is_refused(self):
        prefill, decode = self.pair()
        self.init(prefill, decode, self.room)
        decode.run(sglang.forget_events)  # receives no event of anything that happens
        prefill.kill()
        prefill = self.restarted(prefill)
        decode.run(sglang.ask, self.room, 60)
        self.fails(decode, self.room, "stale_incarnation.*runs as incarnation")

    def test_of_a_decode_server(self):
        prefill, decode = self.pair()
        self.meet(prefill, decode, self.room, 60)
        prefill.run(sglang.send, self.room, 32)
        decode.kill()
        self.fails(prefill, self.room, "peer_lost")
        self.assert_nothing_is_left(prefill)
        decode = Server(self, "decode")
        self.transfer(prefill, decode, next(self.rooms), 60)

    def test_of_a_prefill_server_that_stands_still(self):
        file = pathlib.Path(self.folder) / "sglang.yaml"
        file.write_text(f"""cluster: still
supervisor: {{host: 127.0.0.1, port: {free_port()}, begin: true, heartbeat_interval: 500ms, heartbeat_timeout: 2s}}
stages: [{{name: sglang, role: both, open: {{max_nodes: 16}}, transport: {{peer_silence: 1s}}}}]
edges: [{{from: sglang, to: sglang, mode: write}}]
""")
        prefill, decode = self.pair_of_deployment(file)
        self.meet(prefill, decode, self.room, 60)
        prefill.run(sglang.send, self.room, 32)
        prefill.processes[0].signal(signal.SIGSTOP)
        self.fails(decode, self.room, "peer_lost")
        prefill.processes[0].signal(signal.SIGCONT)
        self.fails(prefill, self.room, "peer_lost|aborted|stale_incarnation")
        until(lambda: decode.first(sglang.ensure, prefill.address), "the prefill is not ready")
        self.transfer(prefill, decode, next(self.rooms), 60)

    def test_of_the_supervisor(self):
        prefill, decode = self.pair()
        self.transfer(prefill, decode, next(self.rooms), 60)
        notice = pathlib.Path(os.environ["XDG_STATE_HOME"], "troupe/sglang/supervisor")
        os.kill(json.loads(notice.read_text())["pid"], signal.SIGKILL)
        self.transfer(prefill, decode, next(self.rooms), 60)

    def test_a_server_that_nobody_asks_gives_up_with_sglangs_own_sentence(self):
        process = self.process(SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT="1", SGLANG_DISAGGREGATION_WAITING_TIMEOUT="1")
        prefill = Server(self, "prefill", processes=[process])
        prefill.run(sglang.begin, self.room, prefill.address)
        self.fails(prefill, self.room, "timed out after .* in KVPoll.Bootstrapping")
        self.assert_nothing_is_left(prefill)
        decode, room = Server(self, "decode", processes=[process]), next(self.rooms)
        self.init(prefill, decode, room)
        decode.run(sglang.ask, room, 60)
        self.fails(decode, room, "timed out after .* in KVPoll.WaitingForInput")
        self.assert_nothing_is_left(decode)


class Misfits(Transfers):
    """Servers that do not fit each other fail the rooms that both take part in, with the reason, and nothing else."""

    def refused(self, prefill, decode, said, asks=True):
        decode.run(sglang.begin, self.room, prefill.address)
        if not asks:
            until(lambda: decode.first(sglang.ensure, prefill.address) or decode.poll(self.room) == FAILED, "nothing happens")
        else:
            until(lambda: decode.first(sglang.ensure, prefill.address), "the prefill is not ready")
            prefill.run(sglang.begin, self.room, prefill.address)
            decode.run(sglang.init, self.room)
            if decode.poll(self.room) != FAILED:
                decode.run(sglang.ask, self.room, 60)
        self.assert_fails(decode, self.room, said)
        decode.run(sglang.drop, self.room)

    def test_unequal_dtypes(self):
        prefill, decode = self.pair({"dtype": "fp8_e4m3"})
        self.refused(prefill, decode, "kv_cache_dtype is fp8_e4m3, and bfloat16 here.*--kv-cache-dtype", asks=False)
        fitting = Server(self, "prefill")
        self.transfer(fitting, decode, next(self.rooms), 60)

    def test_unequal_layers(self):
        prefill, decode = self.pair({"layers": 3})
        self.refused(prefill, decode, "layout_mismatch.*layers.*3.*4|layout_mismatch.*4.*3")

    def test_unequal_heads(self):
        prefill, decode = self.pair({"heads": 8})
        self.refused(prefill, decode, "layout_mismatch.*heads.*8.*4|layout_mismatch.*4.*8")

    def test_unequal_components(self):
        prefill, decode = self.pair({"states": ("mamba",)})
        self.refused(prefill, decode, "it has the caches kv, mamba, and this one kv")

    def test_unequal_metadata(self):
        prefill, decode = self.pair({"hidden": 32})
        self.meet(prefill, decode, self.room, 60)
        prefill.run(sglang.send, self.room, 60, last=True)
        self.assert_fails(decode, self.room, "metadata of the prefill server has rows of .*128")

    def test_another_cluster(self):
        process = self.process(TROUPE_SGLANG=json.dumps({"cluster": "elsewhere"}))
        prefill, decode = Server(self, "prefill", processes=[process]), Server(self, "decode")
        self.refused(prefill, decode, r"another cluster \(elsewhere, .*\) than these \(sglang, .*name one supervisor")

    def test_a_server_of_another_backend(self):
        prefill, decode = self.pair()
        prefill.run(sglang.forget_troupe)
        self.refused(prefill, decode, "it has another transfer backend")

    def test_a_bootstrap_server_that_says_nonsense(self):
        prefill, decode = self.pair()
        good = {"protocol": 1, "cluster": "", "caches": ["kv"], "nodes": [["n"]], "lives": [[1]]}
        for said in (7, [], {}, {**good, "protocol": "x"}, {**good, "nodes": []}, {**good, "nodes": [[]]},
                     {**good, "nodes": [[1]]}, {**good, "lives": [["a"]]}, {**good, "caches": "kv"}, {**good, "lives": [7]}):
            prefill.run(sglang.say_of_troupe, said)
            self.room = next(self.rooms)
            self.refused(prefill, decode, "does not name Troupe's nodes as expected")
        prefill.run(sglang.say_of_troupe, good)
        self.room = next(self.rooms)
        self.refused(prefill, decode, "speak protocol 1 and these")

    def test_pages_that_do_not_fit(self):
        prefill, decode = self.pair()
        self.meet(prefill, decode, self.room, 60)
        prefill.run(sglang.send, self.room, 16)
        prefill.run(sglang.send_pages, self.room, [63, 64])
        self.assertEqual(prefill.poll(self.room), FAILED)
        self.assertRegex(prefill.first(sglang.failure, self.room)[1], "out_of_range.*block 1024 of a cache of 1024")
        self.assert_fails(decode, self.room, ".")

    def test_fewer_tokens_than_the_decode_server_asks_for(self):
        prefill, decode = self.pair()
        self.meet(prefill, decode, self.room, 100)
        prefill.run(sglang.finalize, self.room, 60)
        prefill.run(sglang.send, self.room, 60, last=True)
        self.assertEqual(prefill.poll(self.room), FAILED)
        self.assertIn("asks for 112 tokens, and the prefill server has 64", prefill.first(sglang.failure, self.room)[1])
        self.assert_fails(decode, self.room, ".")

    def test_pages_that_end_later_than_the_prompt_of_a_server_of_which_nothing_is_heard(self):
        prefill, decode = self.pair({"page_size": 16, "pages": 64}, {"page_size": 64, "pages": 16})
        prefill.run(sglang.hear_nothing_of_nodes)
        self.meet(prefill, decode, self.room, 100)
        prefill.run(sglang.finalize, self.room, 100)
        prefill.run(sglang.send, self.room, 100, last=True)
        self.assertEqual(prefill.poll(self.room), FAILED)
        self.assertRegex(prefill.first(sglang.failure, self.room)[1],
                         "asks for 128 tokens.*nothing was heard of node 'sglang.decode-.*does the supervisor run")
        self.assert_fails(decode, self.room, ".")

    def test_a_setting_that_is_none(self):
        process = self.process(TROUPE_SGLANG=json.dumps({"suprevisor": "h:1"}))
        with self.assertRaisesRegex(Failure, "TROUPE_SGLANG knows no 'suprevisor'; did you mean 'supervisor'"):
            Server(self, "prefill", processes=[process])

    def test_an_option_that_does_not_go_together(self):
        process = self.process(SGLANG_RUST_SERVER="1")
        with self.assertRaisesRegex(Failure, "'troupe' does not work with SGLANG_RUST_SERVER"):
            Server(self, "decode", processes=[process])


class Managers(Transfers):
    """Resources of one process, and what transfers leave behind."""

    def test_several_in_one_process_have_no_ports_but_those_of_their_nodes(self):
        prefill, decode = self.pair({"tp": 2, "together": True}, {"tp": 2, "together": True})
        self.transfer(prefill, decode, self.room, 60, chunks=(32,))
        for server, bootstrap in ((prefill, {prefill.bootstrap}), (decode, set())):
            listening, nodes = server.processes[0].run(sglang.ports)
            self.assertEqual(len(nodes), 2)
            self.assertLessEqual({*nodes, *bootstrap}, set(listening))
            # Besides its own port a node has one for the data that go over tcp.
            self.assertEqual(len(listening), 2 * len(nodes) + len(bootstrap))

    def test_both_roles_in_one_process(self):
        process = self.process()
        prefill, decode = (Server(self, mode, processes=[process]) for mode in ("prefill", "decode"))
        self.transfer(prefill, decode, self.room, 60)

    def test_a_server_that_changes_its_role_leaves_the_cluster(self):
        prefill, decode = self.pair()
        self.transfer(prefill, decode, next(self.rooms), 60)
        decode.run(sglang.begin, self.room, prefill.address)
        decode.run(sglang.init, self.room)
        prefill.run(sglang.stop)
        self.assert_fails(decode, self.room, "gone")

    def test_memory_is_released_and_comes_back(self):
        prefill, decode = self.pair()
        self.transfer(prefill, decode, next(self.rooms), 60)
        self.meet(prefill, decode, self.room, 60)
        decode.run(sglang.release_memory)
        self.assertEqual(decode.poll(self.room), FAILED)
        self.assertIn("released its memory", decode.first(sglang.failure, self.room)[1])
        # A process without nodes does not hear that the prefill server starts again.
        self.assertEqual(decode.first(sglang.known_prefills), [])
        until(lambda: prefill.poll(self.room) == FAILED, "the sender hears nothing")
        prefill.run(sglang.release_memory)
        prefill.run(sglang.resume_memory)
        decode.run(sglang.resume_memory)
        self.transfer(prefill, decode, next(self.rooms), 60)

    def test_what_a_transfer_took_goes_to_sglangs_collector(self):
        prefill, decode = self.pair()
        self.meet(prefill, decode, self.room, 100, prefix=32)
        prefill.run(sglang.send, self.room, 48)
        prefill.run(sglang.send, self.room, 100, last=True)
        self.end(prefill, decode, self.room)
        seconds, size, collected = prefill.first(sglang.metric, self.room)
        self.assertEqual(size, (112 - 32) * 4 * 4 * (32 + 32))  # tokens, layers, heads, bytes of a head
        self.assertTrue(0 < seconds < PATIENCE)
        self.assertAlmostEqual(collected["latency_ms"], seconds * 1000)
        self.assertAlmostEqual(collected["total_mb"], size / 2**20)

    def test_the_nodes_end_before_the_interpreter(self):
        process = self.process()
        decode = Server(self, "decode", processes=[process])
        self.assertTrue(decode.first(sglang.interpreter_ends))

    def test_a_checksum_is_compared_where_there_is_one_rank(self):
        for tp, said in ((1, True), (2, False)):
            prefill, decode = self.pair({"tp": tp})
            until(lambda decode=decode, prefill=prefill: decode.first(sglang.ensure, prefill.address), "it is not ready")
            self.assertEqual(decode.first(sglang.verifies, prefill.address), said)

    def test_the_deployment_of_the_page_joins_servers_under_tls(self):
        folder = pathlib.Path(self.folder)
        subprocess.run([os.environ["TROUPE_COMMAND"], "certs", "init", folder / "keys", "--cluster", "sglang"], check=True,
                       stdout=subprocess.DEVNULL)
        page = (pathlib.Path(__file__).resolve().parents[2] / "docs/sglang.md").read_text()
        [text] = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if block.startswith("cluster:")]
        text = text.replace("/etc/troupe/sglang", str(folder / "keys")).replace("node-a.example.org", "127.0.0.1")
        file = folder / "sglang.yaml"
        file.write_text(text.replace("7400", str(free_port())))
        supervisor = subprocess.Popen([os.environ["TROUPE_COMMAND"], "node", file, "--name", "supervisor"],
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(supervisor.wait)
        self.addCleanup(supervisor.terminate)
        prefill, decode = self.pair_of_deployment(file)
        self.transfer(prefill, decode, self.room, 60)

    def test_a_deployment_of_a_file(self):
        port = free_port()
        file = pathlib.Path(self.folder) / "sglang.yaml"
        file.write_text(f"""cluster: c
supervisor: {{host: 127.0.0.1, port: {port}, begin: true}}
stages: [{{name: sglang, role: both, open: {{max_nodes: 16}}}}]
edges: [{{from: sglang, to: sglang, mode: write}}]
""")
        prefill, decode = self.pair_of_deployment(file)
        self.transfer(prefill, decode, self.room, 60)


class Bootstrap(Transfers):
    """The bootstrap server, compared with SGLang's own."""

    def test_it_answers_as_sglangs_own_does(self):
        process = self.process()
        for seed in range(6):
            self.assertEqual(process.run(sglang.unlike_sglangs_server, seed), [])

    def test_a_rank_that_registers_again_does_not_stand_for_another(self):
        process = self.process()
        port = free_port()
        process.run(sglang.serve_bootstrap, port)
        row = {"attn_tp_size": 2, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1,
               "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0,
               "rank_ip": "127.0.0.1", "rank_port": 1, "page_size": 16, "kv_cache_dtype": "auto", "kv_layout": None,
               "troupe": {"protocol": 1, "cluster": "c", "caches": ["kv"], "nodes": ["n0"], "lives": [2**63]}}
        query = "/route?prefill_dp_rank={0}&prefill_cp_rank={0}&target_tp_rank={0}&target_pp_rank={0}"

        def ask(method, path, body=None):
            return process.run(sglang.http, method, f"http://127.0.0.1:{port}{path}", body)

        for _ in range(3):
            self.assertEqual(ask("PUT", "/route", row)[0], 200)
        self.assertEqual(ask("GET", query.format(-1))[0], 503)
        second = {**row, "attn_tp_rank": 1, "troupe": {**row["troupe"], "nodes": ["n1"], "lives": [7]}}
        self.assertEqual(ask("PUT", "/route", second)[0], 200)
        self.assertEqual(ask("GET", query.format(-1))[0], 200)
        said = json.loads(ask("GET", query.format(0))[1])["troupe"]
        self.assertEqual((said["nodes"], said["lives"]), ([["n0", "n1"]], [[2**63, 7]]))
        for body in ("{", [], {}, {**row, "troupe": {}}, {**row, "troupe": 7}, {**row, "pp_rank": "x"},
                     {**row, "troupe": {**row["troupe"], "lives": []}}):
            self.assertEqual(ask("PUT", "/route", body)[0], 400, body)
        self.assertEqual(ask("GET", query.format("x"))[0], 400)
        self.assertEqual(ask("GET", query.format(5))[0], 404)
        self.assertEqual(json.loads(ask("GET", query.format(0))[1])["troupe"], said)


def end_supervisors(state):
    """Supervisors that were started on demand outlive the tests."""
    for notice in state.glob("troupe/*/supervisor"):
        with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
            ended = os.pidfd_open(json.loads(notice.read_text())["pid"])
            signal.pidfd_send_signal(ended, signal.SIGTERM)
            select.select([ended], [], [], PATIENCE)
            os.close(ended)


if __name__ == "__main__":
    command, library = (str(pathlib.Path(path).resolve()) for path in sys.argv[1:3])
    with tempfile.TemporaryDirectory() as own:  # supervisors leave state files of their clusters
        os.environ.update(TROUPE_COMMAND=command, TROUPE_LIBRARY=library, XDG_STATE_HOME=own)
        Process.nursery = Nursery(sglang.serve, sglang.import_sglang)
        try:
            unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
        finally:
            end_supervisors(pathlib.Path(own))
