"""Troupe's coordinator in place of vLLM-Omni's, with vLLM-Omni's clients for stages and hubs unchanged, over real
sockets.

Run by ctest, omni.coordinator.
"""
import json
import os
import random
import signal
import sys
import time
import unittest
import unittest.mock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# pylint: disable=wrong-import-position
import zmq
from vllm_omni.distributed import omni_coordinator
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_coordinator import OmniCoordClientForHub, OmniCoordClientForStage
from vllm_omni.distributed.omni_coordinator.load_balancer import LeastQueueLengthBalancer
from vllm_omni.distributed.omni_coordinator.messages import ReplicaStatus

import troupe.omni
from troupe.omni.coordinator import PORTS, Coordinator, CoordinatorRuntime
from troupe.omni.replicas import FORGOTTEN, BadEventError, Replicas

PATIENCE = 30  # seconds


def event(address="tcp://a", kind="update", status="up", queue=0, stage=0, **other):
    return json.dumps({"input_addr": address, "output_addr": f"{address}-out", "stage_id": stage, "event_type": kind,
                       "status": status, "queue_length": queue, **other}).encode()


class Registry(unittest.TestCase):
    def setUp(self):
        self.now, self.replicas = 100.0, Replicas(30.0)

    def hear(self, *words, **more):
        return self.replicas.hear(event(*words, **more), now=self.now, wall=1e9 + self.now)

    def up(self):
        return [one["input_addr"] for one in self.replicas.active()]

    def wait(self, seconds):
        self.now += seconds
        return self.replicas.tick(self.now)

    def test_what_a_stage_says_is_what_hubs_are_told(self):
        self.assertTrue(self.hear(queue=3, stage=2))
        self.assertEqual(self.replicas.active(), [{"input_addr": "tcp://a", "output_addr": "tcp://a-out", "stage_id": 2,
                                                   "status": "up", "queue_length": 3, "last_heartbeat": 1e9 + 100,
                                                   "registered_at": 1e9 + 100}])
        self.now += 5
        self.assertFalse(self.hear(kind="heartbeat", queue=3, stage=2))  # nothing relevant has changed
        self.assertTrue(self.hear(kind="heartbeat", queue=4, stage=2))
        self.assertEqual(self.replicas.active()[0]["queue_length"], 4)
        self.assertEqual((self.replicas.active()[0]["last_heartbeat"], self.replicas.active()[0]["registered_at"]),
                         (1e9 + 105, 1e9 + 100))

    def test_one_that_is_silent_is_lost_and_up_again_with_its_next_word(self):
        self.hear()
        self.assertFalse(self.wait(30.0))
        self.assertTrue(self.wait(0.1))
        self.assertEqual(self.up(), [])
        self.assertFalse(self.wait(1.0))
        self.assertTrue(self.hear(kind="heartbeat"))
        self.assertEqual(self.up(), ["tcp://a"])

    def test_one_that_leaves_is_down_whatever_comes_late(self):
        self.hear()
        self.assertTrue(self.hear(status="down"))
        self.assertFalse(self.hear(kind="heartbeat"))
        self.assertEqual(self.up(), [])
        self.now += 1
        self.assertTrue(self.hear())
        self.assertEqual(self.replicas.active()[0]["registered_at"], 1e9 + 101)  # a new process at the same address

    def test_an_error_that_a_replica_reports_lasts_until_it_says_that_it_is_over(self):
        self.hear()
        self.assertTrue(self.hear(status="error"))
        for status in ("error", "up"):
            self.assertFalse(self.hear(kind="heartbeat", status=status))
        self.assertEqual(self.up(), [])
        self.assertTrue(self.hear(status="up"))
        self.assertEqual(self.up(), ["tcp://a"])

    def test_a_heartbeat_of_nobody_registers_it(self):
        self.assertTrue(self.hear(kind="heartbeat", queue=2))
        self.assertEqual(self.up(), ["tcp://a"])
        self.assertFalse(self.hear("tcp://b", kind="heartbeat", status="error"))
        self.assertFalse(self.hear("tcp://c", status="down"))
        self.assertEqual((self.up(), len(self.replicas)), (["tcp://a"], 3))

    def test_those_that_are_gone_are_forgotten_after_ten_minutes(self):
        self.hear()
        self.hear("tcp://b", status="down")
        self.wait(FORGOTTEN + 1)
        self.assertEqual(len(self.replicas), 0)

    def test_there_are_so_many_and_no_more_and_the_dead_make_room(self):
        self.replicas = Replicas(30.0, most=3)
        for name in "abc":
            self.hear(f"tcp://{name}")
        with self.assertRaisesRegex(BadEventError, "beyond the limit of 3 live replicas"):
            self.hear("tcp://d")
        self.hear("tcp://b", status="down")
        self.hear("tcp://d")
        self.assertEqual(self.up(), ["tcp://a", "tcp://c", "tcp://d"])

    def test_what_is_no_event_is_refused_and_changes_nothing(self):
        self.hear()
        good = json.loads(event())
        lacking = [json.dumps({key: value for key, value in good.items() if key != without}).encode()
                   for without in good if without != "queue_length"]
        for bad in (b"", b"\xff", b"[]", b"7", b"{}", b"[" * 60_000, event(status="away"), event(kind="hello"),
                    event(stage=-1), event(stage=True), event(stage="0"), event(queue=-1), event(queue=1.5), event(""),
                    event("x" * 2000), event(pad="x" * 70_000), *lacking):
            with self.assertRaises(BadEventError, msg=str(bad[:80])):
                self.replicas.hear(bad, now=self.now, wall=0.0)
        self.assertEqual(self.up(), ["tcp://a"])
        chance, raw = random.Random(3), event()
        for _ in range(2000):
            other = bytearray(raw)
            other[chance.randrange(len(other))] = chance.randrange(256)
            try:
                self.replicas.hear(bytes(other), now=self.now, wall=0.0)
            except BadEventError:
                pass


class Patient(unittest.TestCase):
    def until(self, happens, said):
        limit = time.monotonic() + PATIENCE
        while not happens():
            self.assertLess(time.monotonic(), limit, said)
            time.sleep(0.02)


class Sockets(Patient):
    def setUp(self):
        self.coordinator = self.start()

    def start(self, router="tcp://127.0.0.1:0", pub="tcp://127.0.0.1:0", timeout=30.0):
        made = Coordinator(router_zmq_addr=router, pub_zmq_addr=pub, heartbeat_timeout=timeout)
        self.addCleanup(lambda: made._closed or made.close())
        return made

    def stage(self, address, number=0, to=None):
        made = OmniCoordClientForStage((to or self.coordinator).router_address, address, f"{address}-out", number)
        self.addCleanup(lambda: made._closed or made.close())
        return made

    def hub(self, of=None):
        made = OmniCoordClientForHub((of or self.coordinator).pub_address)
        self.addCleanup(lambda: made._closed or made.close())
        return made

    def test_a_hub_hears_of_every_replica_whoever_starts_first(self):
        early = self.stage("tcp://early", 1)
        hub = self.hub()
        late = self.stage("tcp://late", 1)
        other = self.stage("tcp://other", 2)
        self.until(lambda: len(hub.get_replica_list().replicas) == 3, "the hub does not hear of all")
        self.assertEqual({one.input_addr for one in hub.get_replicas_for_stage(1).replicas},
                         {"tcp://early", "tcp://late"})
        late.update_info(queue_length=7)
        early.update_info(queue_length=2)
        self.until(lambda: {one.queue_length for one in hub.get_replicas_for_stage(1).replicas} == {7, 2}, "queues")
        replicas = hub.get_replicas_for_stage(1).replicas
        self.assertEqual(replicas[LeastQueueLengthBalancer().select(None, replicas)].input_addr, "tcp://early")
        other.close()
        late.update_info(status=ReplicaStatus.ERROR)
        self.until(lambda: [one.input_addr for one in hub.get_replica_list().replicas] == ["tcp://early"], "others are")
        self.assertEqual([one.input_addr for one in self.coordinator.get_active_replicas().replicas], ["tcp://early"])

    def test_a_coordinator_that_starts_again_loses_nobody(self):
        stage, hub = self.stage("tcp://a", 1), self.hub()
        self.until(lambda: hub.get_replica_list().replicas, "the hub does not hear of it")
        router, pub = self.coordinator.router_address, self.coordinator.pub_address
        self.coordinator.close()
        again = self.start(router, pub)
        self.assertEqual(again.get_active_replicas().replicas, [])
        self.until(lambda: stage._send_event("heartbeat") or again.get_active_replicas().replicas, "it is lost")
        before = hub.get_replica_list().timestamp
        self.until(lambda: hub.get_replica_list().timestamp > before and hub.get_replica_list().replicas, "the hub is")

    def test_many_updates_are_told_a_tenth_of_a_second_apart(self):
        with zmq.Context() as context, context.socket(zmq.SUB) as heard:
            heard.setsockopt(zmq.SUBSCRIBE, b"")
            heard.connect(self.coordinator.pub_address)
            stage = self.stage("tcp://a")
            time.sleep(0.5)
            while heard.poll(0):
                heard.recv()
            began = time.monotonic()
            for queue in range(80):
                stage.update_info(queue_length=queue)
                time.sleep(0.01)
            seconds, count, last = time.monotonic() - began, 0, None
            while heard.poll(500):
                last, count = json.loads(heard.recv()), count + 1
            self.assertIn(count, range(2, int(seconds * 10) + 4))
            self.assertEqual(last["replicas"][0]["queue_length"], 79)

    def test_garbage_is_counted_and_stops_nobody(self):
        with zmq.Context() as context, context.socket(zmq.DEALER) as other:
            other.setsockopt(zmq.LINGER, 0)
            other.connect(self.coordinator.router_address)
            with self.assertLogs("vllm.troupe.omni.coordinator", "WARNING") as said:
                for raw in (b"", b"\x80\x04", b"{" * 1000, b"x" * 100_000):
                    other.send(raw)
                self.until(lambda: said.output, "nothing is said of it")
            self.assertRegex(said.output[0], "dropped [1-4] events, the last one was an event")
        self.stage("tcp://a")
        self.until(lambda: self.coordinator.get_active_replicas().replicas, "nobody is heard any more")

    def test_an_address_that_is_taken_is_named(self):
        with self.assertRaisesRegex(RuntimeError, f"cannot listen at {self.coordinator.router_address}: "):
            Coordinator(self.coordinator.router_address, "tcp://127.0.0.1:0")
        self.coordinator.close()
        with self.assertRaisesRegex(RuntimeError, "closed already"):
            self.coordinator.close()
        self.coordinator.wait_for_shutdown()


class Runtime(Patient):
    def runtime(self, **more):
        made = CoordinatorRuntime(**{"host": "127.0.0.1", "heartbeat_timeout": 30.0, **more})
        self.addCleanup(made.close)
        return made

    def test_a_process_that_is_killed_is_there_again_and_knows_its_replicas(self):
        runtime = self.runtime()
        stage = OmniCoordClientForStage(runtime.router_address, "tcp://a", "tcp://b", 1)
        self.addCleanup(stage.close)
        hub = OmniCoordClientForHub(runtime.pub_address)
        self.addCleanup(hub.close)
        self.until(lambda: hub.get_replica_list().replicas, "the hub does not hear of it")
        first, before = runtime.pid, hub.get_replica_list().timestamp
        os.kill(first, signal.SIGKILL)
        self.until(lambda: runtime.pid != first, "it is not started again")
        self.until(lambda: stage._send_event("heartbeat") or hub.get_replica_list().timestamp > before and
                   hub.get_replica_list().replicas, "it is lost")
        runtime.close()
        runtime.close()
        self.assertIsNotNone(runtime._process.poll())

    def test_ports_may_be_given_and_what_is_wrong_is_named(self):
        runtime = self.runtime()
        with unittest.mock.patch.dict(os.environ, {PORTS: runtime.router_address.rpartition(":")[2] + ",0"}):
            with self.assertRaisesRegex(RuntimeError, f"cannot listen at {runtime.router_address}"):
                self.runtime()
        with unittest.mock.patch.dict(os.environ, {PORTS: "7500"}):
            with self.assertRaisesRegex(ValueError, "'7500'; give two"):
                self.runtime()
        for wrong in ({"host": ""}, {"heartbeat_timeout": 0}):
            with self.assertRaises(ValueError):
                self.runtime(**wrong)

    def test_the_plugin_takes_it_only_where_it_is_told_to(self):
        theirs = omni_coordinator.OmniCoordinatorRuntime
        self.addCleanup(setattr, omni_coordinator, "OmniCoordinatorRuntime", theirs)
        for said, taken in (("", theirs), ("1", CoordinatorRuntime)):
            OmniConnectorFactory._registry.pop(troupe.omni.NAME, None)
            with unittest.mock.patch.dict(os.environ, {"TROUPE_OMNI_COORDINATOR": said}):
                troupe.omni.register()
            self.assertIs(omni_coordinator.OmniCoordinatorRuntime, taken)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
