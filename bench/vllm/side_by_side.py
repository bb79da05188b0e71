#!/usr/bin/env python3
"""Two vLLM servers on this machine's CPU between which caches move by Troupe, then by NIXL, then not at all.

    side_by_side.py --troupe PROGRAM --library LIBRARY [--requests N] [--rounds N] [--results FOLDER]

Prints the rows of bench/run as a JSON array. Requests are made as by a frontend: the prefill server is asked for one
token, the decode server for eight, with the first one's answer about its cache. Each side is timed by itself, for
prompts of 8, 512 and 1,500 tokens, one at a time and four at once. No two prompts are equal, and nothing is in a prefix
cache.

The pairs take turns, since the threads of an idle pair would disturb the other one: NIXL's never sleep. Each round has
new servers. A round ends with the prefill server stopped, and later killed, after its answer: this measures how long
the decode server takes to answer at all; its answer is on standard error. If no cache moves, each server computes the
prompt itself; these servers are asked in turn like the others, since a server that is asked again at once is faster by
what is still in the processor's caches. A pair computes two requests at the same time, so these are compared one at a
time.
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
sys.path[:0] = [str(TESTS / "engines"), str(TESTS / "environments")]
# pylint: disable=wrong-import-position
import environment
from proxy import WILL_DECODE_ELSEWHERE
from servers import Failed, end_supervisor, free_ports, vllm
from two_servers import VOCABULARY, documented, engines_python

SIZES = (8, 512, 1500)  # tokens of a prompt
AT_ONCE = (1, 4)
TOKENS_OUT = 8
WARM_UP = 3  # requests of each size, for one-time compiling, connecting and registering
PATIENCE = 120  # seconds until a silent server is given up
TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Way:
    """How caches move."""
    name: str
    transfer: dict | None  # kv-transfer-config; None: no cache moves, and there is one server
    own: dict = dataclasses.field(default_factory=dict)  # additional environment of its servers
    side_channels: bool = False


@dataclasses.dataclass
class Seen:
    """The results of one way: seconds of each request by (tokens, at once), and the faults by name."""
    prefill: dict = dataclasses.field(default_factory=dict)
    decode: dict = dataclasses.field(default_factory=dict)
    processor: dict = dataclasses.field(default_factory=dict)
    answers: dict = dataclasses.field(default_factory=dict)
    failed: int = 0  # requests


def ask(server, prompt, tokens, transfer=None):
    """Seconds until the answer came, and its `kv_transfer_params`."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "detokenize": False}
    if transfer:
        body["kv_transfer_params"] = transfer
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        said = json.load(answer)
    if len(said["choices"][0]["token_ids"]) != tokens:
        raise Failed(f"{server.name} said {said['choices'][0]} instead of {tokens} tokens\n{server.tail()}")
    return time.monotonic() - began, said.get("kv_transfer_params")


def processor_seconds(sessions):
    """Processor time of all live processes of these sessions."""
    ticks = 0
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            of = stat.read_text().rpartition(")")[2].split()
            if int(of[3]) in sessions:
                ticks += int(of[11]) + int(of[12])
    return ticks / TICKS


class Prompts:
    """Prompts, no two of them equal, the same in every run."""

    def __init__(self):
        self._chance = random.Random(20)

    def of(self, size, count):
        return [[self._chance.randrange(VOCABULARY) for _ in range(size)] for _ in range(count)]


class Servers:
    """Two servers that run until the stack ends."""

    def __init__(self, way, python, model, folder, stack):
        self.way = way
        cores = sorted(os.sched_getaffinity(0))
        names = ("prefill", "decode")
        ports = free_ports(2 * len(names))
        self.all = []
        for place, name in enumerate(names):
            own = dict(way.own)
            if way.side_channels:
                own["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(ports[len(names) + place])
            self.all.append(stack.enter_context(vllm(name, python, model, ports[place], [cores[place % len(cores)]], folder,
                                                     transfer=way.transfer, environment=own)))
        for server in self.all:
            server.wait_until_up()

    def processor_seconds(self):
        """Processor time of the servers, and of the supervisor that one of them began."""
        sessions = {server.pid for server in self.all}
        with contextlib.suppress(KeyError, OSError, ValueError):
            state = pathlib.Path(self.way.own["XDG_STATE_HOME"])
            sessions.add(os.getsid(json.loads((state / "troupe/vllm/supervisor").read_text())["pid"]))
        return processor_seconds(sessions)

    def loaded(self):
        return self.all[-1].metric("vllm:external_prefix_cache_hits_total")

    def prefill(self, prompt):
        """Seconds, and the parameters for a decode server."""
        took, where = ask(self.all[0], prompt, 1, WILL_DECODE_ELSEWHERE)
        if not where:
            raise Failed(f"{self.all[0].name} did not say where its cache is\n{self.all[0].tail()}")
        return took, where

    def request(self, prompt):
        """Seconds at the prefill side and at the decode side; none if it failed."""
        first, last = self.all[0], self.all[-1]
        try:
            if not self.way.transfer:
                return ask(first, prompt, 1)[0], ask(last, prompt, TOKENS_OUT)[0]
            took, where = self.prefill(prompt)
            return took, ask(last, prompt, TOKENS_OUT, where)[0]
        except (urllib.error.HTTPError, TimeoutError) as why:
            print(f"{self.way.name}: a request of {len(prompt)} tokens failed: {why}", file=sys.stderr)
            return None

    def answer_after(self, number, prompt):
        """Sends this signal to the prefill server; returns the seconds until the decode server answers, and its answer.
        """
        _, where = self.prefill(prompt)
        os.killpg(self.all[0].pid, number)
        began, said = time.monotonic(), "a text"
        try:
            ask(self.all[1], prompt, TOKENS_OUT, where)
        except urllib.error.HTTPError as error:
            said = f"error {error.code}"
        except TimeoutError:
            said = "nothing"
        took = time.monotonic() - began
        if not self.all[1].running:
            raise Failed(f"{self.all[1].name} ended with its peer\n{self.all[1].tail()}")
        return took, said


def measure(servers, seen, prompts, requests):
    for size in SIZES:
        for prompt in prompts.of(size, WARM_UP):
            servers.request(prompt)
        for at_once in AT_ONCE:
            asked = prompts.of(size, requests)
            before, loaded = servers.processor_seconds(), servers.loaded()
            with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
                took = [one for one in threads.map(servers.request, asked) if one]
            spent = servers.processor_seconds() - before
            if not took:
                raise Failed(f"{servers.way.name}: no request of {size} tokens was answered")
            if servers.way.transfer and servers.loaded() - loaded < len(took) * (size - 1):
                raise Failed(f"{servers.way.name}: the decode server computed prompts of {size} tokens, which it should "
                             f"have loaded\n{servers.all[-1].tail()}")
            key = (size, at_once)
            seen.failed += len(asked) - len(took)
            seen.prefill.setdefault(key, []).extend(prefill for prefill, _ in took)
            seen.decode.setdefault(key, []).extend(decode for _, decode in took)
            seen.processor.setdefault(key, []).append(spent / requests)
            print(f"{servers.way.name}: {size} tokens, {at_once} at once: decode {median(seen.decode[key]) * 1e3:.0f} ms, "
                  f"{spent / requests:.2f} s of processor a request", file=sys.stderr)


def disturb(servers, seen, prompts):
    """Runs last, since it damages the pairs."""
    for name, number in (("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL)):
        [prompt] = prompts.of(SIZES[1], 1)
        took, said = servers.answer_after(number, prompt)
        seen.answers.setdefault(name, []).append(took)
        print(f"{servers.way.name}: {said} {took:.1f} s after the prefill server was {name}", file=sys.stderr)
        if number == signal.SIGSTOP:
            os.killpg(servers.all[0].pid, signal.SIGCONT)
            servers.request(prompts.of(SIZES[0], 1)[0])


median = statistics.median


def high(values):
    """The 99th percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def row(name, ours, rival, unit, wanted):
    return {"name": name, "ours": ours, "rival": rival, "ratio": ours / rival, "unit": unit, "wanted": wanted,
            "better": "lower"}


def rows_of(ours, nixl, alone):
    for size in SIZES:
        for at_once in AT_ONCE:
            key = (size, at_once)
            what = f"{size} tokens, {at_once} at once: "
            for side, wanted in (("decode", 1.0), ("prefill", 1.0)):
                mine, its = getattr(ours, side)[key], getattr(nixl, side)[key]
                yield row(what + side + ", p50", median(mine) * 1e3, median(its) * 1e3, "ms", wanted)
                yield row(what + side + ", p99", high(mine) * 1e3, high(its) * 1e3, "ms", wanted)
            yield row(what + "decode, p99 to p50 of ours", high(ours.decode[key]) * 1e3, median(ours.decode[key]) * 1e3,
                      "ms", 2.0)
            if at_once == 1:
                yield row(what + "prefill to a server that keeps nothing", median(ours.prefill[key]) * 1e3,
                          median(alone.prefill[key]) * 1e3, "ms", 1.1)
                yield row(what + "decode to a server that computes the prompt", median(ours.decode[key]) * 1e3,
                          median(alone.decode[key]) * 1e3, "ms", 1.3)
                yield row(what + "decode to such a server, p99", high(ours.decode[key]) * 1e3, high(alone.decode[key]) * 1e3,
                          "ms", 1.3)
            yield row(what + "processor", median(ours.processor[key]), median(nixl.processor[key]), "s", 1.0)
    for name in ours.answers:
        yield row(f"answer when the prefill server was {name}", median(ours.answers[name]), median(nixl.answers[name]), "s",
                  1.0)
    yield row("requests that failed, and one more", ours.failed + 1, nixl.failed + 1, "", 1.0)


def run(asked, folder, stack):
    python = engines_python()
    rival = environment.environment("nixl")
    model = folder / "model"
    subprocess.run([python, TESTS / "engines/model.py", model, "llama"], check=True, stdout=subprocess.DEVNULL)
    state = folder / "state"
    shutil.rmtree(state, ignore_errors=True)
    stack.callback(end_supervisor, state)
    packages = next((rival / "lib").glob("python*/site-packages"))
    ways = [Way("troupe", documented(), {"TROUPE_LIBRARY": str(asked.library), "TROUPE_COMMAND": str(asked.troupe),
                                         "XDG_STATE_HOME": str(state)}),
            Way("nixl", {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
                {"PYTHONPATH": f"{HERE.parents[1] / 'deploy/python'}:{packages}"}, side_channels=True),
            Way("alone", None)]
    seen = {way.name: Seen() for way in ways}
    prompts = Prompts()
    for number in range(asked.rounds):
        for way in ways:
            logs = folder / f"{way.name}-{number}"
            logs.mkdir(exist_ok=True)
            with contextlib.ExitStack() as servers_end:
                servers = Servers(way, python, model, logs, servers_end)
                measure(servers, seen[way.name], prompts, asked.requests)
                if way.transfer:
                    disturb(servers, seen[way.name], prompts)
            end_supervisor(state)  # a supervisor of ours would run on beside the others
    return list(rows_of(seen["troupe"], seen["nixl"], seen["alone"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--troupe", type=pathlib.Path, required=True, help="the troupe command")
    parser.add_argument("--library", type=pathlib.Path, required=True, help="libtroupe.so.0")
    parser.add_argument("--requests", type=int, default=20, help="requests of each kind in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=pathlib.Path, help="where to keep the logs; default: nowhere")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are ended
    with contextlib.ExitStack() as stack:
        folder = asked.results or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            print(json.dumps(run(asked, folder, stack)))
        except (Failed, environment.Failed) as why:
            print(f"side_by_side.py: {why}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
