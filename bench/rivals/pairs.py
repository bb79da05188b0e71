"""Pairs of processes that run side.py, and the driver's orders to them."""
import contextlib
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import time

from refused import Refused

HERE = pathlib.Path(__file__).resolve().parent
PATIENCE = 120  # seconds until a silent side is given up


class Process:
    """One side. Its log and its implementation's go to a file."""

    def __init__(self, contender, name, threads, python, folder):
        options = {"name": name, "own_memory": contender.own_memory, "polling": contender.polling,
                   "transport": contender.transport, "threads": threads}
        self._log = folder / f"{contender.slug}-{name}.log"
        self._log_begin = self._log.stat().st_size if self._log.exists() else 0
        environment = {**python.variables, "PYTHONDONTWRITEBYTECODE": "1", **contender.environment}
        with open(self._log, "ab") as log:
            self._child = subprocess.Popen(
                [python.path, HERE / "side.py", contender.module, json.dumps(options)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, cwd=folder, env=environment)
        self._rest = b""
        try:
            self.received()
        except BaseException:
            self.end()
            raise

    def send(self, do, **arguments):
        try:
            self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise Refused(self._end()) from None

    def received(self, patience=PATIENCE):
        """The answer to the oldest unanswered order."""
        end = time.monotonic() + patience
        out = self._child.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([out], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Refused(f"nothing within {patience:.0f} s")
            some = os.read(out, 1 << 20)
            if not some:
                raise Refused(self._end())
            self._rest += some
        line, _, self._rest = self._rest.partition(b"\n")
        said = json.loads(line)
        if "refused" in said:
            raise Refused(self._with_log(said["refused"]))
        return said

    def ask(self, do, patience=PATIENCE, **arguments):
        self.send(do, **arguments)
        return self.received(patience)

    def signal(self, number):
        self._child.send_signal(number)

    def end(self):
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(2)
        self._child.kill()
        self._child.wait()
        self._child.stdout.close()

    def _end(self):
        code = self._child.wait()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return self._with_log(f"its process {how}")

    def _with_log(self, words):
        """Adds the last error in the log: some implementations otherwise say no more than a number."""
        text = self._log.read_bytes()[self._log_begin:].decode(errors="replace")
        logged = [line for line in text.splitlines() if re.match(r"[EF]\d{4}|.*\b(ERROR|error|Error)\b", line)]
        if not logged:
            return words
        said = re.sub(r"^[EF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] |^\[?\d+[\d.:\- ]*\]? *", "", logged[-1]).strip()
        return words if said in words else f"{words}; {said[:160]}"


class Pair:
    """An initiator and a target of one contender, with memory that the initiator reaches."""

    def __init__(self, contender, threads, python, folder, size):
        self.contender = contender
        self._stack = contextlib.ExitStack()
        self._size = size
        try:
            self.target = self._side("target", threads, python, folder)
            self.initiator = self._side("initiator", threads, python, folder)
            there = self.target.ask("allocate", bytes=size, seed=1)
            self.initiator.ask("allocate", bytes=size, seed=2)
            self.version = there["version"]
            self.initiator.ask("meet", peer=there["peer"])
        except BaseException:
            self.end()
            raise

    def _side(self, name, threads, python, folder):
        side = Process(self.contender, name, threads, python, folder)
        self._stack.callback(side.end)
        return side

    def plan(self, work):
        """Batches that differ, as far as memory allows: bytes that were just moved are in a cache."""
        batches = max(1, min(8, self._size // work.bytes))
        return self.initiator.ask("plan", write=work.write, count=work.count, size=work.size, seed=work.seed,
                                  batches=batches)["seconds"]

    def check(self, work):
        """Moves the first batch and compares every byte of it."""
        source, destination = (self.initiator, self.target) if work.write else (self.target, self.initiator)
        what = {"count": work.count, "size": work.size, "seed": work.seed}
        destination.ask("spoil", local=not work.write, **what)
        self.initiator.ask("once")
        sums = [side.ask("digest", local=side is self.initiator, **what)["checksum"] for side in (source, destination)]
        if sums[0] != sums[1]:
            raise Refused("WRONG BYTES arrived, and it said that all was well")

    def processor(self):
        return self.target.ask("processor")["seconds"]

    def end(self):
        self._stack.close()
