"""Two vLLM servers between which Troupe moves the KV cache of each prompt, the prompts they are asked, and the
common start and end of every test of them."""
import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "environments"))
# pylint: disable=wrong-import-position
import environment
import moriio
from fork_server import ForkServer
from servers import VLLM, Failed, Served, end_supervisor, free_ports, supervisor_pid, variables, vllm, wait_until

VOCABULARY = 2048
LONGEST = 1500
BLOCK = 32
SETTLE_SECONDS = 30
NOT_MOVED = re.compile("tokens were not (loaded|sent)")


def prompts(count):
    """Lengths around the edges of blocks, the longest one, and others between; the same in every run."""
    chance = random.Random(19)
    lengths = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, LONGEST]
    lengths += [chance.randint(3, LONGEST) for _ in range(count)]
    return [[chance.randrange(VOCABULARY) for _ in range(length)] for length in lengths[:count]]


def documented():
    """The configuration of a server as docs/vllm.md shows it."""
    text = (HERE.parents[1] / "docs/vllm.md").read_text(encoding="utf-8")
    return json.loads(re.search(r"--kv-transfer-config '([^']*)'", text)[1])


def shared_folder(asked, folder):
    """The folder that the tests of a build share, beside which their results lie."""
    return folder.parent if asked.results else folder


def model_in(place, python, kind):
    """A model's folder in `place`, which is made once, and remade if model.py has changed."""
    program = HERE / "model.py"
    model = place / f"model-{kind}-{zlib.crc32(program.read_bytes()):08x}"
    if not model.exists():
        with tempfile.TemporaryDirectory(dir=place) as making:
            subprocess.run([python, program, f"{making}/model", kind], check=True, stdout=subprocess.DEVNULL)
            with contextlib.suppress(OSError):  # another test was faster
                os.rename(f"{making}/model", model)
    return model


def beside(transfer, folder):
    """The configuration of a server whose caches another connector of vLLM also keeps in files."""
    files = {"kv_connector": "ExampleConnector", "kv_role": "kv_both",
             "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    return {"kv_connector": "MultiConnector", "kv_role": transfer["kv_role"],
            "kv_connector_extra_config": {"connectors": [transfer, files]}}


class Pair:
    """The two servers, and the proxy in front of them."""

    def __init__(self, python, asked, folder, stack, **of_decode):
        """`of_decode`: settings for the decode server's kv-transfer-config, in addition to those in the
        documentation."""
        self._python, self._folder, self._stack = python, folder, stack
        cores = sorted(os.sched_getaffinity(0))
        *ports, proxy = free_ports(3)
        shared = shared_folder(asked, folder)
        model = model_in(shared, python, asked.model)
        self.flip = folder / "flip"
        self.state = state = folder / "state"
        shutil.rmtree(state, ignore_errors=True)
        stack.callback(end_supervisor, state)
        own = {"TROUPE_LIBRARY": str(asked.library), "TROUPE_COMMAND": str(asked.troupe), "XDG_STATE_HOME": str(state),
               "TROUPE_TEST_FLIP": str(self.flip)}

        self._own = own
        # This is all that a user configures: the first server starts the supervisor, and the servers find each
        # other.
        transfer = {**documented(), "kv_connector": "FlippingConnector", "kv_connector_module_path": "flipping_connector"}
        roles = {"prefill": {}, "decode": {}}
        self.pushes, self.beside = asked.push, asked.beside
        # Whether even requests that are computed together have equal texts; vLLM's kernels of latents differ by
        # more than float32's last bits.
        self.exact = asked.dtype == "float32" and asked.model != "latents"
        if self.pushes:
            transfer["kv_connector_extra_config"] = {"read_mode": False}
        # Routers push from servers that write no text to servers that compute no prompt for others.
        if self.pushes or asked.divided:
            roles = {"prefill": {"kv_role": "kv_producer"}, "decode": {"kv_role": "kv_consumer"}}
        roles["decode"].update(of_decode)
        shutil.rmtree(folder / "stored", ignore_errors=True)
        ranks = {"prefill": asked.ranks, "decode": 1}
        self._discovery = free_ports(1)[0] if asked.moriio else None
        forks = self._start(ForkServer(python, VLLM, shared, variables(OMP_NUM_THREADS="1")))

        def begin(name):
            place = list(ranks).index(name)
            own_cores = [cores[(place + rank) % len(cores)] for rank in range(ranks[name])]
            said = {**transfer, **roles[name]}
            if self._discovery:
                said = moriio.configured(said, name, ports[place], self._discovery)
            if asked.beside:
                said = beside(said, folder / "stored")
            return self._start(vllm(name, python, model, ports[place], own_cores, folder, dtype=asked.dtype,
                                    transfer=said, environment=own, more=asked.words, forks=forks))

        self._begin = begin
        self.prefill, self.decode = begin("prefill"), begin("decode")
        self.proxy = self._start(Served("proxy", proxy, [sys.executable, HERE / "proxy.py", proxy, self.prefill.url,
                                                         self.decode.url], folder))

    def _start(self, process):
        return self._stack.enter_context(process)

    def wait_until_up(self):
        for server in (self.prefill, self.decode):
            server.wait_until_up()

    def begin_again(self, name, meanwhile=lambda: None):
        """Replaces a killed server, whose log stays. `meanwhile`: called until the replacement is up."""
        log = getattr(self, name).log
        log.rename(log.with_name(f"{name}.killed.log"))
        setattr(self, name, self._begin(name))
        meanwhile()
        getattr(self, name).wait_until_up()

    def begin_router(self, name="router", port=None):
        """A `troupe router`, which finds the servers by itself."""
        if port is None:
            [port] = free_ports(1)
        router = self._start(Served(name, port, [self._python, "-m", "troupe.router", "--port", port], self._folder,
                                    self._own))
        router.wait_until_up("/metrics")
        wait_until(lambda: router.metric("troupe_router_engine_usable") == 2,
                   lambda: f"the router finds both servers\n{router.tail()}", SETTLE_SECONDS)
        return router

    def supervisor_pid(self):
        """The notice of the supervisor that listens, or listened last."""
        return supervisor_pid(self.state)

    def begin_vllm_router(self, connector="nixl"):
        """vLLM's own router, which takes both for servers with that connector. MoRIIO's register with it."""
        port, prometheus = free_ports(2)
        packages = next((environment.environment("vllm-router") / "lib").glob("python*/site-packages"))
        found = ["--prefill", self.prefill.url, "--decode", self.decode.url] if connector == "nixl" \
            else ["--vllm-discovery-address", f"127.0.0.1:{self._discovery}"]
        router = self._start(Served(f"vllm-router-{connector}", port, [
            self._python, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--kv-connector", connector,
            *found, "--host", "127.0.0.1", "--port", port, "--prometheus-port", prometheus], self._folder,
            {"PYTHONPATH": str(packages)}))
        router.wait_until_up()
        if connector == "moriio":
            moriio.wait_until_found(router)
        return router

    def usage(self):
        return {server.name: server.metric("vllm:kv_cache_usage_perc") for server in (self.prefill, self.decode)}


def check_released(pair, seconds=SETTLE_SECONDS, what=""):
    """Waits until no block is taken at either side. `what` is printed before the time that this took."""
    began = time.monotonic()
    wait_until(lambda: not any(pair.usage().values()),
               lambda: f"{what}no block is taken, but {pair.usage()}\n{pair.prefill.tail()}\n{pair.decode.tail()}",
               seconds)
    print(f"{what}no block is taken at either side, after {time.monotonic() - began:.1f} s", flush=True)


class Clock:
    """Prints how long something took since the test began."""

    def __init__(self):
        self._began = time.monotonic()

    def took(self, what):
        print(f"[{time.monotonic() - self._began:5.1f} s] {what}", flush=True)


def engines_python():
    """The Python environment that has vLLM. Processes started here find the compiled files beside it."""
    where = environment.environment("engines")
    os.environ.update(environment.variables(where))
    return where / "bin/python"


def parser(description):
    of_all = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    of_all.add_argument("--troupe", type=pathlib.Path, required=True, help="the troupe command")
    of_all.add_argument("--library", type=pathlib.Path, required=True, help="libtroupe.so.0")
    of_all.add_argument("--results", type=pathlib.Path, help="where logs stay; none: they are removed")
    of_all.add_argument("--push", action="store_true", help="caches are written by who computes them")
    of_all.set_defaults(model="llama", ranks=1, dtype="bfloat16", words=(), moriio=False, beside=False, divided=False)
    return of_all


def judge(run, asked):
    """The exit status of a test: `run(asked, folder, stack)` raises when it finds a defect."""
    with contextlib.ExitStack() as stack:
        folder = asked.results or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run(asked, folder, stack)
        except environment.Unreachable as why:
            print(f"skipped: {why}")
            return environment.UNREACHABLE
        except (Failed, environment.Failed) as why:
            print(f"failed: {why}")
            for line in not_moved(folder):
                print(line)
            return 1
    return 0


def not_moved(folder):
    """What the servers' logs say of caches that did not move, since their answers give no reason."""
    for log in sorted(folder.glob("*.log")):
        with open(log, encoding="utf-8", errors="replace") as lines:
            yield from (f"{log.name}: {line.rstrip()}" for line in lines if NOT_MOVED.search(line))
