"""Servers, router and supervisor are killed and stopped under load while another server lives. No client of the
router sees an error, every text is the one that a server writes alone, and a process that comes back serves again
without a restart of the others."""
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request

from clients import Crowd
from servers import Failed, wait_until

CLIENTS = 4  # of the router, at once
AFTER = 2 * CLIENTS  # texts that show that everything goes on


def is_at(router, server):
    """Whether the router has a request at this server now."""
    return router.metric("troupe_router_engine_requests", engine=server.address) > 0


def pairs(router):
    """Attempts that used two servers."""
    return router.metric("troupe_router_attempts_total", how="pair")


def placed(pair, router):
    """Attempts where the supervisor placed them; those that asked both servers at once, where it was not asked."""
    return router.metric("troupe_router_pushed_total") if pair.pushes \
        else router.metric("troupe_router_placements_total", by="supervisor")


def alone(router):
    """Attempts that used one server."""
    return router.metric("troupe_router_attempts_total", how="alone")


def carried_on(router):
    return int(router.metric("troupe_router_carried_on_total"))


def health(router):
    try:
        with urllib.request.urlopen(f"{router.url}/health", timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refused:
        return json.load(refused)


def is_whole(router):
    """Waits until the supervisor answers and both servers are usable members."""
    said = health(router)
    return said["supervisor"] and [(one["usable"], one["member"]) for one in said["engines"]] == [(True, "up")] * 2


def check_serves_again(pair, router, crowd):
    """Checks that the supervisor places requests and their prompts move between the servers."""
    wait_until(lambda: is_whole(router), lambda: f"all is as it was, but {health(router)}\n{router.tail()}")
    before = pairs(router), placed(pair, router)
    wait_until(lambda: pairs(router) > before[0] + 1 and placed(pair, router) > before[1] + 1,
               lambda: f"requests are placed and prompts move, but {crowd}\n{router.tail()}")
    crowd.wait_for(AFTER)


def lose(pair, router, name, outage, crowd):
    """An outage that begins in the middle of a request at the server, while everything else goes on. A prompt that
    is pushed may be computed where its text is written, which the router does not see."""
    server, began = getattr(pair, name), time.monotonic()
    before, before_alone = carried_on(router), alone(router)
    crowd.wait_for(CLIENTS)
    wait_until(lambda: is_at(router, server), f"a request is at the {name} server\n{router.tail()}")
    with outage(server):
        wait_until(lambda: carried_on(router) > before or pair.pushes and alone(router) > before_alone,
                   lambda: f"a request goes on elsewhere\n{router.tail()}")
        crowd.wait_for(AFTER)
    print(f"the {name} server: {carried_on(router) - before} requests went on elsewhere within "
          f"{time.monotonic() - began:.1f} s, {crowd}", flush=True)


@contextlib.contextmanager
def killed(server):
    server.kill()
    yield


def check_server_stopped(pair, router, due, name):
    with Crowd(router.url, due, CLIENTS) as crowd:
        lose(pair, router, name, lambda server: server.stopped(), crowd)
        check_serves_again(pair, router, crowd)


def check_server_killed(pair, router, due, name, meanwhile=lambda: None):
    """`meanwhile`: called while the replacement starts."""
    with Crowd(router.url, due, CLIENTS) as crowd:
        lose(pair, router, name, killed, crowd)
    pair.begin_again(name, meanwhile)
    with Crowd(router.url, due, CLIENTS) as crowd:
        check_serves_again(pair, router, crowd)


@contextlib.contextmanager
def stopped_process(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def check_supervisor_stopped(pair, router, due):
    with Crowd(router.url, due, CLIENTS) as crowd:
        crowd.wait_for(CLIENTS)
        before = pairs(router)
        with stopped_process(pair.supervisor_pid()):
            wait_until(lambda: not health(router)["supervisor"], "the router misses the supervisor")
            crowd.wait_for(AFTER)
        if pairs(router) == before:
            raise Failed(f"without a supervisor no prompt moved\n{router.tail()}")
        check_serves_again(pair, router, crowd)
    print(f"the supervisor stood still: {crowd}", flush=True)


def check_supervisor_killed(pair, router, due):
    """The servers start another supervisor."""
    pid = pair.supervisor_pid()
    with Crowd(router.url, due, CLIENTS) as crowd:
        crowd.wait_for(CLIENTS)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        wait_until(lambda: pair.supervisor_pid() != pid, "another supervisor is begun")
        found = time.monotonic() - began
        check_serves_again(pair, router, crowd)
    print(f"the supervisor was killed, another one came after {found:.1f} s: {crowd}", flush=True)


def check_router_stopped(router, due):
    with Crowd(router.url, due, CLIENTS) as crowd:
        crowd.wait_for(CLIENTS)
        with router.stopped():
            time.sleep(3)  # longer than an idle connection lasts, and than the router's check interval
        crowd.wait_for(AFTER)
    print(f"the router stood still: {crowd}", flush=True)


def check_router_killed(pair, router, due):
    """The router's clients lose their answers, and find the next router at the same place."""
    with Crowd(router.url, due, CLIENTS, may_be_lost=True) as crowd:
        crowd.wait_for(CLIENTS)
        router.kill()
        crowd.wait_for(CLIENTS, "lost")
        router = pair.begin_router("router.again", int(router.url.rpartition(":")[2]))
        crowd.wait_for(AFTER)
        check_serves_again(pair, router, crowd)
    print(f"the router was killed, and another one begun: {crowd}", flush=True)
    return router
