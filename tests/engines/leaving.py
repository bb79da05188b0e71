"""Clients that leave at each point of a request's way through the two servers. The servers' own metrics show that
the point is reached, and that no request ended before its client had left."""
import contextlib
import time

from clients import asked_of, body_of, decode_body, prefill_body, prefilled, read_some
from servers import LONGEST, SEATS, Failed, wait_until
from two_servers import check_released

# For the blocks of a client that leaves: 2 s on a quiet machine, with room for a busy one.
RELEASED_SECONDS = 10
LEASE_SECONDS = 30  # of a cache that is never requested
TRIES = 10  # a text may be complete before its client leaves, if a core stalls

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
FETCHES = "vllm:num_requests_kv_fetch_by_stage"


def texts_written(server):
    return server.metric("vllm:request_success_total", finished_reason="length")


class Passed(Exception):
    """A request ended before it was seen at the point where its client was to leave."""


class Point:
    """The points where clients leave. `prefill` and `decode`: the servers."""

    def __init__(self, pair):
        self.prefill, self.decode = pair.prefill, pair.decode
        self._written = {server: texts_written(server) for server in (self.prefill, self.decode)}

    def is_passed(self, *servers):
        """Whether a text of these servers has ended since this began."""
        return any(texts_written(server) != self._written[server] for server in servers)

    def reach(self, server, value, name, **labels):
        def is_reached():
            if server.metric(name, **labels) == value:
                return True
            if self.is_passed(server):
                raise Passed
            return False

        wait_until(is_reached, lambda: f"{name} {labels} is {value}\n{server.tail()}")


def wait_for_metric(server, value, name, **labels):
    wait_until(lambda: server.metric(name, **labels) == value, lambda: f"{name} {labels} is {value}\n{server.tail()}")


def long_text(server):
    """A client that leaves at the end of the context, without waiting for the end of its text."""
    return asked_of(server.url, body_of([1], LONGEST - 1))


def long_decode(point, prompt, params):
    return asked_of(point.decode.url, decode_body(prompt, params, LONGEST - len(prompt)))


@contextlib.contextmanager
def taken(point, server, seats):
    """Long texts that take this many seats of a server until their clients leave at the end of the context."""
    with contextlib.ExitStack() as stack:
        for _ in range(seats):
            stack.enter_context(long_text(server))
        point.reach(server, seats, RUNNING)
        yield


def leave_queued_at_prefill(point, prompt):
    with taken(point, point.prefill, SEATS):
        with asked_of(point.prefill.url, prefill_body(prompt)):
            point.reach(point.prefill, 1, WAITING)
        wait_for_metric(point.prefill, 0, WAITING)


def leave_being_prefilled(point, prompt):
    """The server computes the prompt in several steps; a request without a text to write ends with the last step."""
    with asked_of(point.prefill.url, prefill_body(prompt)):
        point.reach(point.prefill, 1, RUNNING)


def leave_queued_at_decode(point, prompt, params):
    with taken(point, point.decode, SEATS):
        with long_decode(point, prompt, params):
            point.reach(point.decode, 1, FETCHES, stage="waiting_to_start")
        wait_for_metric(point.decode, 0, FETCHES, stage="waiting_to_start")


def leave_waiting_for_cache(point, prompt, params):
    with point.prefill.stopped():
        with long_decode(point, prompt, params):
            point.reach(point.decode, 1, FETCHES, stage="in_progress")
        wait_for_metric(point.decode, 0, FETCHES, stage="in_progress")


def leave_loaded(point, prompt, params):
    """Takes the last seat while the cache cannot come: the prefill server is stopped before it is asked for the
    cache."""
    with taken(point, point.decode, SEATS - 1), contextlib.ExitStack() as last:
        with contextlib.ExitStack() as request:
            with point.prefill.stopped():
                request.enter_context(long_decode(point, prompt, params))
                point.reach(point.decode, 1, FETCHES, stage="in_progress")
                last.enter_context(long_text(point.decode))
                point.reach(point.decode, SEATS, RUNNING)
            point.reach(point.decode, 1, FETCHES, stage="completed_waiting")
        wait_for_metric(point.decode, 0, FETCHES, stage="completed_waiting")


def leave_decoding(point, prompt, params):
    with long_decode(point, prompt, params):
        point.reach(point.decode, 1, RUNNING)


def leave_stream(point, prompt, params):
    read_some(point.decode.url, decode_body(prompt, params, LONGEST - len(prompt)), 4)


AT_PREFILL = {"queued at the prefill server": leave_queued_at_prefill, "being prefilled": leave_being_prefilled}
AT_DECODE = {"queued at the decode server": leave_queued_at_decode, "waiting for the cache": leave_waiting_for_cache,
             "just after the load": leave_loaded, "decoding": leave_decoding, "in the middle of a stream": leave_stream}


def check_point(pair, name, leave, *arguments):
    """Whether no request ended before its client had left."""
    point = Point(pair)
    with contextlib.suppress(Passed):
        leave(point, *arguments)
    try:
        check_released(pair, RELEASED_SECONDS, f"left {name}: ")
    except Failed:
        # A prompt that was computed before its client left waits for the end of its lease.
        if not point.is_passed(point.prefill):
            raise
        check_released(pair, LEASE_SECONDS, f"left {name} too late: ")
    return not point.is_passed(point.prefill, point.decode)


def check_points(pair, prompt):
    for name, leave in (AT_PREFILL | AT_DECODE).items():
        for _ in range(TRIES):
            params = [prefilled(pair, prompt)] if name in AT_DECODE else []
            if check_point(pair, name, leave, prompt, *params):
                break
        else:
            raise Failed(f"no client left {name} before its request, or one that took a seat, came to its end")


def check_between(pair, prompt):
    """The client leaves between the servers: the cache is never requested, and its lease ends."""
    prefilled(pair, prompt)
    began = time.monotonic()
    wait_for_metric(pair.prefill, 0, RUNNING)
    if not pair.prefill.metric("vllm:kv_cache_usage_perc"):
        raise Failed(f"the prefill server does not keep what it has computed\n{pair.prefill.tail()}")
    wait_until(lambda: not pair.prefill.metric("vllm:kv_cache_usage_perc"), pair.prefill.tail,
               LEASE_SECONDS + RELEASED_SECONDS)
    print(f"left between the servers: no block is taken after {time.monotonic() - began:.1f} s", flush=True)
