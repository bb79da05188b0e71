"""Clients that leave at each point of a request's way through the two servers. The servers' own metrics say that the
point is reached, and that nothing came to its end before its client had left."""
import contextlib
import time

from clients import asked_of, body_of, decode_body, prefill_body, prefilled, read_some
from servers import LONGEST, SEATS, Failed, wait_until
from two_servers import check_released

# Of what a client that leaves had: 2 s on a quiet machine, and no test fails because another one is busy.
RELEASED_SECONDS = 10
LEASE_SECONDS = 30  # of a cache for which nobody asks
TRIES = 5

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
FETCHES = "vllm:num_requests_kv_fetch_by_stage"


def wait_for_metric(server, value, name, **labels):
    wait_until(lambda: server.metric(name, **labels) == value, lambda: f"{name} {labels} is {value}\n{server.tail()}")


def long_text(server):
    """A client that leaves at the end of the context; nobody waits for the end of its text."""
    return asked_of(server.url, body_of([1], LONGEST - 1))


def long_decode(pair, prompt, params):
    return asked_of(pair.decode.url, decode_body(prompt, params, LONGEST - len(prompt)))


@contextlib.contextmanager
def taken(server, seats):
    """Long texts take so many seats of a server, until their clients leave at the end of the context."""
    with contextlib.ExitStack() as stack:
        for _ in range(seats):
            stack.enter_context(long_text(server))
        wait_for_metric(server, seats, RUNNING)
        yield


def leave_queued_at_prefill(pair, prompt):
    with taken(pair.prefill, SEATS):
        with asked_of(pair.prefill.url, prefill_body(prompt)):
            wait_for_metric(pair.prefill, 1, WAITING)
        wait_for_metric(pair.prefill, 0, WAITING)


def leave_being_prefilled(pair, prompt):
    """Its server computes the prompt in several steps, and a request that has no text to write ends with the last."""
    with asked_of(pair.prefill.url, prefill_body(prompt)):
        wait_for_metric(pair.prefill, 1, RUNNING)


def leave_queued_at_decode(pair, prompt, params):
    with taken(pair.decode, SEATS):
        with long_decode(pair, prompt, params):
            wait_for_metric(pair.decode, 1, FETCHES, stage="waiting_to_start")
        wait_for_metric(pair.decode, 0, FETCHES, stage="waiting_to_start")


def leave_waiting_for_cache(pair, prompt, params):
    with pair.prefill.stopped():
        with long_decode(pair, prompt, params):
            wait_for_metric(pair.decode, 1, FETCHES, stage="in_progress")
        wait_for_metric(pair.decode, 0, FETCHES, stage="in_progress")


def leave_loaded(pair, prompt, params):
    """The last seat is taken while the cache cannot come: the prefill server stands still before it is asked for it."""
    with taken(pair.decode, SEATS - 1), contextlib.ExitStack() as last:
        with contextlib.ExitStack() as request:
            with pair.prefill.stopped():
                request.enter_context(long_decode(pair, prompt, params))
                wait_for_metric(pair.decode, 1, FETCHES, stage="in_progress")
                last.enter_context(long_text(pair.decode))
                wait_for_metric(pair.decode, SEATS, RUNNING)
            wait_for_metric(pair.decode, 1, FETCHES, stage="completed_waiting")
        wait_for_metric(pair.decode, 0, FETCHES, stage="completed_waiting")


def leave_decoding(pair, prompt, params):
    with long_decode(pair, prompt, params):
        wait_for_metric(pair.decode, 1, RUNNING)


def leave_stream(pair, prompt, params):
    read_some(pair.decode.url, decode_body(prompt, params, LONGEST - len(prompt)), 4)


AT_PREFILL = {"queued at the prefill server": leave_queued_at_prefill, "being prefilled": leave_being_prefilled}
AT_DECODE = {"queued at the decode server": leave_queued_at_decode, "waiting for the cache": leave_waiting_for_cache,
             "just after the load": leave_loaded, "decoding": leave_decoding, "in the middle of a stream": leave_stream}


def texts_written(pair):
    return [server.metric("vllm:request_success_total", finished_reason="length")
            for server in (pair.prefill, pair.decode)]


def check_point(pair, name, leave, *arguments):
    """Whether nothing came to its end before its client had left."""
    before = texts_written(pair)
    leave(pair, *arguments)
    check_released(pair, RELEASED_SECONDS, f"left {name}: ")
    return texts_written(pair) == before


def check_points(pair, prompt):
    for name, leave in (AT_PREFILL | AT_DECODE).items():
        for _ in range(TRIES):
            params = [prefilled(pair, prompt)] if name in AT_DECODE else []
            if check_point(pair, name, leave, prompt, *params):
                break
        else:
            raise Failed(f"no client left {name} before its request, or one that took a seat, came to its end")


def check_between(pair, prompt):
    """Its client leaves between the servers: nobody has asked for the cache, whose lease ends."""
    prefilled(pair, prompt)
    began = time.monotonic()
    wait_for_metric(pair.prefill, 0, RUNNING)
    if not pair.prefill.metric("vllm:kv_cache_usage_perc"):
        raise Failed(f"the prefill server does not keep what it has computed\n{pair.prefill.tail()}")
    wait_until(lambda: not pair.prefill.metric("vllm:kv_cache_usage_perc"), pair.prefill.tail,
               LEASE_SECONDS + RELEASED_SECONDS)
    print(f"left between the servers: no block is taken after {time.monotonic() - began:.1f} s", flush=True)
