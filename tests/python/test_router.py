"""The router's parts that need no server: what it reads, chooses and knows of a text. tests/router tests the whole.
"""

from __future__ import annotations

import asyncio
import json
import resource
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from troupe.errors import ErrorCode, TroupeError
from troupe.hand_off import new_transfer, source_params
from troupe.router.carry import as_chat, continued, why_fixed
from troupe.router.choice import Chooser, Wanted
from troupe.router.door import connections_of
from troupe.router.errors import ApiError, one_line
from troupe.router.events import LONGEST, Cutter, TooLongError, data_of, event_of, is_comment
from troupe.router.incoming import CHAT, COMPLETIONS, id_of, read
from troupe.router.instances import Fleet, Instance
from troupe.router.legs import decode_leg, encoded, prefill_leg
from troupe.router.line import Line
from troupe.router.members import Members
from troupe.router.options import settings_of
from troupe.router.roster import Roster, engines_of
from troupe.router.said import Said
from troupe.router.settings import GivenEngine, Limits, Settings, SettingsError, settings_from
from troupe.router.waiting import within

# -- settings


def test_a_router_without_settings_listens_here_and_looks_for_the_cluster_of_this_machine() -> None:
    settings = settings_of([])
    assert settings == Settings()
    assert (settings.host, settings.port, settings.has_cluster) == ("127.0.0.1", 8080, True)


def test_engines_that_are_named_need_no_cluster() -> None:
    settings = settings_of(["--prefill", "http://a:1/", "--decode", "http://b:2", "--plain", "https://c"])
    assert settings.engines == (
        GivenEngine("http://a:1", "prefill"),
        GivenEngine("http://b:2", "decode"),
        GivenEngine("https://c", "plain", says_tokens=False),
    )
    assert not settings.has_cluster
    assert settings_of(["--both", "http://a:1", "--supervisor", "h:7400"]).has_cluster


def test_a_file_says_everything_and_the_command_line_goes_before_it() -> None:
    said = {
        "listen": {"host": "0.0.0.0", "port": 0},
        "cluster": {"deployment": "troupe.yaml"},
        "engines": [{"url": "http://a:1", "role": "prefill", "node": "prefill-0"}],
        "limits": {"running": 1, "body": "1MiB"},
        "times": {"patience": "500ms", "request": "2m"},
        "log_level": "debug",
    }
    settings = settings_from(said)
    assert (settings.host, settings.port, settings.deployment) == ("0.0.0.0", 0, "troupe.yaml")
    assert settings.engines[0].node == "prefill-0"
    assert (settings.limits.running, settings.limits.body) == (1, 2**20)
    assert (settings.times.patience, settings.times.request) == (0.5, 120)
    assert settings_from({}) == Settings()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([], "give keys and values"),
        ({"limit": {}}, "the file knows no limit; it has listen"),
        ({"limits": {"running": 0}}, "limits.running is 0; give a number from 1"),
        ({"limits": {"running": True}}, "limits.running is True"),
        ({"limits": {"body": 5}}, "limits.body is 5; give a size"),
        ({"limits": {"bodies": "1MiB"}}, "limits.bodies is less than limits.body"),
        ({"times": {"patience": 30}}, "times.patience is 30; give a time with its unit"),
        ({"times": {"patience": "25h"}}, "at most 24h"),
        ({"engines": {}}, "engines is {}; give a list"),
        ({"engines": [{"url": "http://a"}]}, r"engines\[0\] has no role"),
        ({"engines": [{"url": "http://a/v1", "role": "both"}]}, "without a path"),
        ({"engines": [{"url": "http://a:99999", "role": "both"}]}, "its port is not a number from 0 to 65535"),
        ({"engines": [{"url": "http://me:secret@a", "role": "both"}]}, "names a user"),
        ({"engines": [{"url": "http://a", "role": "boss"}]}, "give one of prefill, decode, both, plain"),
        ({"engines": [{"url": "http://a", "role": "both", "says_tokens": 1}]}, "give true or false"),
        ({"cluster": {"supervisor": "a:1", "deployment": "f"}}, "give one of them"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(said: object, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settings_from(said)


@pytest.mark.parametrize(
    "words",
    [
        ["--prefill", "a:1"],
        ["--both", "http://a", "--plain", "http://a"],
        ["--port", "70000"],
        ["--supervisor", "a:1", "--deployment", "f"],
        ["no-such-file.yaml"],
        ["--log-level", "loud"],
    ],
)
def test_wrong_arguments_end_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if words == ["no-such-file.yaml"]:
        pytest.importorskip("yaml")
    with pytest.raises(SystemExit) as ended:
        settings_of(words)
    assert ended.value.code == 2
    assert "troupe router: error: " in capsys.readouterr().err


# -- events


def test_events_are_whole_however_their_bytes_come() -> None:
    text = b'data: {"a": 1}\n\n: alive\n\ndata: b\r\n\r\nevent: x\ndata: c\ndata: d\n\n'
    for step in (1, 2, 3, 7, len(text)):
        cutter = Cutter()
        events = [event for at in range(0, len(text), step) for event in cutter.feed(text[at : at + step])]
        assert [data_of(event) for event in events] == [b'{"a": 1}', None, b"b", b"c\nd"]
    assert event_of({"a": "é"}) == 'data: {"a":"é"}\n\n'.encode()


def test_comments_are_told_from_what_has_no_data() -> None:
    assert [is_comment(one) for one in (b": a", b": a\r\n: b", b"data:", b"event: x", b": a\nretry: 1")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert data_of(b"data: \nevent: x") is None
    assert data_of(b"data: [DONE] ") == b"[DONE]"


def test_what_others_say_is_one_line_of_a_log() -> None:
    assert one_line("a\nb\x1b[1m\u2028\ud800é") == "a\\nb\\x1b[1m\\u2028\\ud800é"
    assert one_line("a" * 9, 4) == "aaaa..."


def test_an_event_that_does_not_end_is_given_up() -> None:
    cutter = Cutter()
    assert cutter.feed(b"x" * LONGEST) == []
    with pytest.raises(TooLongError):
        cutter.feed(b"x")


# -- what a client wants


def request(body: object, path: str = COMPLETIONS, **headers: str) -> Any:
    return read(path, json.dumps(body).encode(), headers, "id")


def test_ids_of_clients_are_kept_where_logs_can_hold_them() -> None:
    assert id_of({"X-Request-Id": "mine-1"}) == "mine-1"
    for bad in ("", "a b", "x" * 129, "é"):
        assert len(id_of({"X-Request-Id": bad})) == 24


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        ({"prompt": "a"}, False),
        ({"prompt": [1, 2, 3]}, False),
        ({"prompt": ["a"]}, False),
        ({"prompt": ["a", "b"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt": "a", "n": 2}, True),
        ({"prompt": "a", "n": 1, "best_of": 3}, True),
        ({"prompt": "a", "max_tokens": 1}, True),
        ({"prompt": "a", "prompt_logprobs": 0}, True),
        ({"prompt": "a", "echo": True}, False),
        ({"messages": [], "max_completion_tokens": 1}, True),
    ],
)
def test_what_two_engines_cannot_share_is_known_by_its_body(body: dict[str, Any], whole: bool) -> None:
    assert bool(request(body).whole) == whole


def test_conversations_in_which_somebody_has_answered_and_sessions_have_an_affinity() -> None:
    user = {"role": "user", "content": "hi"}
    assert request({"messages": [user]}, CHAT).affinity is None
    second = [user, {"role": "assistant", "content": "a"}, user]
    third = [*second, {"role": "assistant", "content": "b"}, user]
    bound = request({"messages": second}, CHAT).affinity
    assert bound == request({"messages": third}, CHAT).affinity
    assert bound != request({"messages": [{"role": "user", "content": "ho"}, *second[1:]]}, CHAT).affinity
    session = request({"prompt": "a", "session_id": "s"}).affinity
    assert session == request({"prompt": "b"}, **{"X-Session-Id": "s"}).affinity
    assert len(session) < 256


def test_what_is_no_request_is_refused() -> None:
    own = b'{"vllm_xargs": {"kv_transfer_params": "x"}}'  # vLLM takes them from there, too
    for data in (b"", b"[]", b"nul", b"[" * 100_000, b'{"stream": 1}', b'{"kv_transfer_params": {}}', own):
        with pytest.raises(ApiError) as refused:
            read(COMPLETIONS, data, {}, "id")
        assert refused.value.status == 400


def test_what_can_be_read_but_not_written_is_refused() -> None:
    body: dict[str, Any] = {}
    inner = body
    for _ in range(100_000):
        inner["a"] = inner = {}
    with pytest.raises(ApiError, match="nested too deeply"):
        encoded(body)


def test_headers_that_no_request_may_have_do_not_go_on() -> None:
    for value in ("Bearer \udcff", "Bearer é", "a\tb"):
        with pytest.raises(ApiError, match="authorization"):
            read(COMPLETIONS, b"{}", {"authorization": value}, "id")
    assert read(COMPLETIONS, b"{}", {"authorization": "Bearer k"}, "id").headers["authorization"] == "Bearer k"


# -- requests to engines


def test_the_engine_of_the_prompt_is_asked_for_one_token_and_the_cache() -> None:
    body = {"messages": [], "max_tokens": 9, "min_tokens": 3, "stream": True, "stream_options": {}, "tools": [1]}
    leg = prefill_leg(body, chat=True)
    assert (leg["max_tokens"], leg["max_completion_tokens"], leg["stream"]) == (1, 1, False)
    assert not {"min_tokens", "stream_options"} & leg.keys()
    assert leg["tools"] == [1]
    assert leg["kv_transfer_params"]["do_remote_decode"] is True
    assert "max_completion_tokens" not in prefill_leg({"prompt": "a"}, chat=False)
    assert body["max_tokens"] == 9


def test_the_engine_of_the_text_is_told_where_the_cache_is() -> None:
    assert decode_leg({"prompt": "a"}, None, tokens=False) == {"prompt": "a"}
    leg = decode_leg({"prompt": "a"}, {"x": 1}, tokens=True)
    assert leg == {"prompt": "a", "kv_transfer_params": {"x": 1}, "return_token_ids": True}


def test_engines_that_are_asked_at_once_are_told_of_one_transfer() -> None:
    transfer = new_transfer("engines.p.0")
    assert transfer != new_transfer("engines.p.0")
    assert transfer.startswith("engines.p.0-")
    asked = prefill_leg({"prompt": "a"}, chat=False, transfer=transfer)["kv_transfer_params"]
    assert asked.pop("troupe") == {"v": 1, "request": transfer}
    assert asked == prefill_leg({"prompt": "a"}, chat=False)["kv_transfer_params"]
    source = source_params(transfer, ("engines.p.0", "engines.p.1"), engine_id="")
    assert source == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "",
        "remote_request_id": transfer,
        "remote_block_ids": [],
        "remote_host": "",
        "remote_port": 0,
        "tp_size": 2,
        "troupe": {"v": 1, "request": transfer, "nodes": ["engines.p.0", "engines.p.1"]},
    }


# -- the text so far


def chunk(text: str = "", tokens: list[int] | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": None, **more}
    if tokens is not None:
        choice["token_ids"] = tokens
    return {"id": "i", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}


def texts(chunks: list[dict[str, Any]]) -> list[str]:
    return [one["choices"][0]["text"] for one in chunks]


def test_a_text_can_be_continued_behind_its_last_whole_character() -> None:
    said = Said(chat=False, wants_tokens=False)
    said.begin()
    assert texts(said.take(chunk("a", [1], prompt_token_ids=[7, 8]))) == ["a"]
    assert said.take(chunk("", [2])) == []
    assert (said.prompt, said.tokens) == ([7, 8], [1])
    assert texts(said.take(chunk("é", [3]))) == ["", "é"]
    assert said.tokens == [1, 2, 3]
    said.take(chunk("", [4]))
    said.begin()  # the stream broke: the next engine sends the half again
    [told] = said.take(chunk("ü", [4, 5], prompt_token_ids=[7, 8, 1, 2, 3]))
    assert (said.prompt, said.tokens) == ([7, 8], [1, 2, 3, 4, 5])
    assert told["choices"][0] == {"index": 0, "text": "ü", "finish_reason": None}


def test_what_an_engine_has_said_is_heard_before_its_client_is_told() -> None:
    said = Said(chat=False, wants_tokens=False)
    said.begin()
    assert not said.heard
    assert said.take(chunk("", [2])) == []
    assert (said.heard, said.started) == (True, False)
    said.begin()
    assert not said.heard
    said.pass_on()
    assert (said.heard, said.started) == (True, True)


def test_a_client_of_token_ids_waits_for_no_more_of_them_than_a_character_can_have() -> None:
    said = Said(chat=False, wants_tokens=True)
    said.begin()
    told = [len(said.take(chunk("", [token]))) for token in range(8)]
    assert told == [0, 0, 0, 4, 1, 1, 1, 1]  # engines without a tokenizer never send text
    assert said.tokens == list(range(8))


def test_usage_counts_what_engines_before_have_said() -> None:
    said = Said(chat=False, wants_tokens=False)
    said.begin()
    said.take(chunk("ab", [1, 2], prompt_token_ids=[9] * 5))
    said.begin()
    said.take(chunk("c", [3]))
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}
    [told] = said.take({"id": "other", "choices": [], "usage": usage})
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert told["id"] == "i"
    assert said.usage() == told["usage"]
    assert said.counted


@pytest.mark.parametrize(
    ("delta", "word"),
    [({"reasoning": "hm"}, "reasoning"), ({"tool_calls": [{}]}, "tool_calls"), ({"content": "a"}, "")],
)
def test_a_chat_that_is_more_than_text_is_not_continued(delta: dict[str, Any], word: str) -> None:
    said = Said(chat=True, wants_tokens=False)
    said.begin()
    one = chunk(tokens=[1])
    one["choices"][0]["delta"] = delta
    assert len(said.take(one)) == 1
    assert word in said.fixed
    assert bool(said.fixed) == bool(word)


def test_text_without_its_tokens_and_several_choices_are_not_continued() -> None:
    for one in (chunk("a"), {**chunk("a", [1]), "choices": [{"index": 1, "text": "a"}]}):
        said = Said(chat=False, wants_tokens=False)
        said.begin()
        assert len(said.take(one)) == 1
        assert said.fixed


# -- requests for the rest


def said_so_far() -> Said:
    said = Said(chat=False, wants_tokens=False)
    said.begin()
    said.take(chunk("abc", [1, 2, 3], prompt_token_ids=[7, 8]))
    return said


def test_the_rest_is_asked_for_by_tokens() -> None:
    body = {
        "model": "m",
        "prompt": "x",
        "max_tokens": 10,
        "min_tokens": 5,
        "temperature": 0,
        "stream": True,
        "user": "u",
    }
    assert continued(body, said_so_far(), 100) == {
        "model": "m",
        "prompt": [7, 8, 1, 2, 3],
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0,
        "stream": True,
        "user": "u",
    }


@pytest.mark.parametrize(
    ("body", "longest", "left"),
    [
        ({"prompt": "x"}, None, 13),  # the endpoint's default is 16
        ({"prompt": "x", "max_tokens": 10}, 9, 4),
        ({"messages": []}, 20, 15),
        ({"messages": [], "max_completion_tokens": 6, "max_tokens": 99}, 50, 3),
        ({"messages": [], "max_tokens": 3}, 50, 0),
    ],
)
def test_as_much_is_left_as_the_first_engine_had(body: dict[str, Any], longest: int | None, left: int) -> None:
    made = continued(body, said_so_far(), longest)
    assert isinstance(made, dict)
    assert made["max_tokens"] == left


def test_what_nobody_knows_is_not_guessed() -> None:
    assert "no max_tokens" in str(continued({"messages": []}, said_so_far(), None))
    assert "tokens of its prompt" in str(continued({"prompt": "x"}, Said(chat=False, wants_tokens=False), 9))


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({}, ""),
        ({"stop": None, "n": 1, "presence_penalty": 0.0, "tools": [], "response_format": {"type": "text"}}, ""),
        ({"seed": 1, "temperature": 0}, ""),
        ({"seed": 1}, "seed"),
        ({"stop": ["\n"]}, "stop"),
        ({"n": 2}, "n"),
        ({"logprobs": 0}, "logprobs"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"a_key_of_tomorrow": True}, "a_key_of_tomorrow"),
    ],
)
def test_only_a_text_that_depends_on_tokens_alone_is_continued(more: dict[str, Any], word: str) -> None:
    why = why_fixed({"prompt": "a", "max_tokens": 9, **more})
    assert word in why
    assert bool(why) == bool(word)


def test_a_chat_with_more_than_text_is_not_continued_as_tokens() -> None:
    text = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    assert not why_fixed({"messages": [text]})
    assert "more than text" in why_fixed({"messages": [text, image]})


def test_chunks_of_a_text_become_chunks_of_a_chat() -> None:
    assert as_chat({"choices": [{"index": 0, "text": "a"}]}) == {"choices": [{"index": 0, "delta": {"content": "a"}}]}
    assert as_chat({"choices": [{"index": 0, "text": ""}]})["choices"][0]["delta"] == {}


# -- choosing


def instance(name: str, role: str = "both", **more: Any) -> Instance:
    made = Instance.of(GivenEngine(f"http://{name}", role))
    made.ready = True
    for key, value in more.items():
        setattr(made, key, value)
    return made


def fleet_of(*instances: Instance) -> Fleet:
    fleet = Fleet()
    for one in instances:
        fleet.add(one)
    return fleet


def chosen(fleet: Fleet, wanted: Wanted | None = None, per_engine: int = 9) -> tuple[str | None, str] | None:
    seat = Chooser(fleet, per_engine).choose(wanted or Wanted())
    return None if seat is None else (seat.prefill and seat.prefill.name, seat.decode.name)


def test_the_least_busy_engines_are_chosen_and_never_one_for_both() -> None:
    a, b, c = instance("a", outstanding=2), instance("b"), instance("c", outstanding=1)
    assert chosen(fleet_of(a, b, c)) == ("c", "b")
    assert chosen(fleet_of(instance("a"))) == (None, "a")


def test_equal_engines_take_turns() -> None:
    fleet = fleet_of(instance("a"), instance("b"))
    chooser = Chooser(fleet, 9)
    turns = [chooser.choose(Wanted()) for _ in range(4)]
    assert [one.decode.name for one in turns if one] == ["a", "b", "a", "b"]


def test_roles_layouts_and_models_are_kept() -> None:
    p, d = instance("p", "prefill"), instance("d", "decode")
    assert chosen(fleet_of(p, d)) == ("p", "d")
    assert chosen(fleet_of(p)) is None
    assert chosen(fleet_of(d)) == (None, "d")
    p.fingerprint, d.fingerprint = "1", "2"
    assert chosen(fleet_of(p, d)) == (None, "d")
    a, b, other = instance("a"), instance("b"), instance("other")
    a.cards = b.cards = [{"id": "m"}]
    other.cards = [{"id": "n"}]
    assert chosen(fleet_of(other, a, b), Wanted("m")) == ("b", "a")
    assert chosen(fleet_of(other, a, b), Wanted("n")) == (None, "other")
    a.ready = b.ready = False
    assert chosen(fleet_of(other, a, b), Wanted("m")) is None


def test_engines_that_failed_a_moment_ago_go_last() -> None:
    a, b, c = instance("a"), instance("b"), instance("c")
    a.failed()
    assert chosen(fleet_of(a, b, c)) == ("c", "b")
    assert chosen(fleet_of(a, b, c), Wanted(failed={b})) == (None, "c")
    assert chosen(fleet_of(a)) == (None, "a")
    a.served()
    assert not a.rests()


def test_who_has_lost_a_request_rests_before_it_is_asked_again() -> None:
    a, b = instance("a"), instance("b")
    a.failed()
    assert chosen(fleet_of(a), Wanted(failed={a})) is None
    a.served()
    assert chosen(fleet_of(a), Wanted(failed={a})) == (None, "a")
    b.member = "suspect"
    assert chosen(fleet_of(a, b), Wanted(failed={a})) is None, "b is there or gone in a moment"
    assert chosen(fleet_of(a, b)) == (None, "a"), "who has lost nothing is not waited for"
    b.member = "down"
    assert chosen(fleet_of(a, b), Wanted(failed={a})) == (None, "a")


def test_a_cache_is_pushed_where_both_engines_do_that_and_every_node_of_the_first_is_known() -> None:
    p, d = instance("p", "prefill", mode="write", ranks=("p.0",)), instance("d", "decode", mode="write")
    assert p.pushes_to(d)
    assert not d.pushes_to(p), "its nodes are not known"
    p.mode = "read"
    assert not p.pushes_to(d)
    p.mode, d.mode = "write", "read"
    assert not p.pushes_to(d)
    assert not instance("p", "prefill").pushes_to(instance("d", "decode"))


def test_full_engines_are_waited_for_and_not_gone_round() -> None:
    p, d = instance("p", "prefill", outstanding=9), instance("d", "decode")
    assert chosen(fleet_of(p, d)) is None
    assert chosen(fleet_of(p, d, instance("w", "plain"))) == (None, "w")


def test_the_word_of_the_supervisor_counts_while_it_is_not_far_off() -> None:
    a, b, c = instance("a"), instance("b"), instance("c", outstanding=3)
    assert chosen(fleet_of(a, b, c), Wanted(placed=(c, b))) == ("c", "b")
    c.outstanding = 8
    assert chosen(fleet_of(a, b, c), Wanted(placed=(c, b))) == ("b", "a")


# -- the line


def line_of(fleet: Fleet, patience: float = 0.05, **limits: int) -> Line:
    given = Limits(**limits)
    return Line(fleet, Chooser(fleet, given.per_engine), given, patience)


def test_a_line_of_bounded_length_is_served_in_turn() -> None:
    async def main() -> None:
        line = line_of(fleet_of(instance("a", "decode")), patience=9, running=1, waiting=2)
        order: list[int] = []

        async def one(number: int) -> None:
            async with line.seat(Wanted()):
                order.append(number)
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(one(number)) for number in range(4)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 1, 2]
        refused = done[3]
        assert isinstance(refused, ApiError)
        assert (refused.status, refused.retry_after) == (429, 3)
        assert (line.running, line.waiting) == (0, 0)

    asyncio.run(main())


def test_who_waits_too_long_or_goes_away_leaves_the_line() -> None:
    async def main() -> None:
        a = instance("a", "decode")
        line = line_of(fleet_of(a), running=1)
        async with line.seat(Wanted()):
            with pytest.raises(ApiError) as late:
                async with line.seat(Wanted()):
                    pass
            assert late.value.status == 429
            task = asyncio.create_task(line.seat(Wanted()).__aenter__())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert line.waiting == 0
        assert (line.running, a.outstanding) == (0, 0)

    asyncio.run(main())


def test_where_nobody_is_there_new_requests_do_not_wait_and_begun_ones_do() -> None:
    async def main() -> None:
        a = instance("a", "decode", ready=False)
        fleet = fleet_of(a)
        line = line_of(fleet, patience=9)
        with pytest.raises(ApiError) as refused:
            async with line.seat(Wanted()):
                pass
        assert refused.value.status == 503

        async def again() -> str:
            async with line.seat(Wanted(), again=True) as seat:
                return seat.decode.name

        task = asyncio.create_task(again())
        await asyncio.sleep(0.01)
        assert not task.done()
        a.ready = True
        fleet.on_change()
        assert await task == "a"

    asyncio.run(main())


def test_many_who_want_the_same_are_looked_for_once() -> None:
    async def main() -> None:
        fleet = fleet_of(instance("a", "decode", outstanding=9))
        looked = 0

        class Counting(Chooser):
            def choose(self, wanted: Wanted) -> Any:
                nonlocal looked
                looked += 1
                return super().choose(wanted)

        line = Line(fleet, Counting(fleet, 9), Limits(), 9)

        async def one(model: str) -> None:
            async with line.seat(Wanted(model)):
                pass

        tasks = [asyncio.create_task(one(model)) for model in "mmmmmmnn"]
        await asyncio.sleep(0)
        looked = 0
        line.serve()
        assert looked == 2
        next(iter(fleet)).outstanding = 0
        line.serve()
        await asyncio.gather(*tasks)

    asyncio.run(main())


# -- waiting


def test_a_wait_has_an_end_and_its_work_has_one_by_then() -> None:
    async def main() -> None:
        ended = []

        async def work(seconds: float) -> int:
            try:
                await asyncio.sleep(seconds)
            finally:
                ended.append(seconds)
            return 7

        assert await within(9, work(0)) == 7
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, work(9))
        over = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(over.set_result, None)
        with pytest.raises(asyncio.TimeoutError):
            await within(9, work(8), over)
        assert ended == [0, 9, 8]
        gone = asyncio.get_running_loop().create_future()
        gone.cancel()

        async def waits() -> None:
            await gone

        with pytest.raises(asyncio.TimeoutError):
            await within(9, waits())

    asyncio.run(main())


def test_a_cancellation_that_comes_with_the_result_is_no_result() -> None:
    async def main() -> None:
        result = asyncio.get_running_loop().create_future()

        async def work() -> None:
            await result

        task = asyncio.create_task(within(9, work()))
        for _ in range(3):
            await asyncio.sleep(0)
        result.set_result(None)
        await asyncio.sleep(0)  # the work has ended, but the waiting request does not know it yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


# -- the door


def test_files_for_the_engines_are_not_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    def most(soft: int, hard: int, **limits: int) -> tuple[int, int | None]:
        said: list[int] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair: said.append(pair[0]))
        return connections_of(Limits(**limits)), said[-1] if said else None

    assert most(1024, 100_000) == (4096, 4096 + 2 * 512 + 128)
    assert most(100_000, 100_000) == (4096, None)
    assert most(1024, 4096) == (4096 - 2 * 512 - 128, 4096)
    assert most(256, 256) == (128, 256)
    assert most(resource.RLIM_INFINITY, resource.RLIM_INFINITY, connections=9) == (9, None)


# -- members


def entry(state: str = "up", role: str = "both", node: str = "n") -> dict[str, Any]:
    return {"state": state, "role": role, "nodes": frozenset({node}), "fingerprint": "f"}


def test_who_is_missing_in_the_membership_and_answers_has_time_to_come_to_the_next_supervisor() -> None:
    fleet = Fleet()
    roster = Roster(fleet)
    told: list[str] = []
    found = {"http://a:1": entry(node="a"), "http://b:1": entry(node="b")}
    roster.adopt(found, 0)
    for one in fleet:
        one.ready = True
        one.when_lost(told.append)
    roster.adopt({}, 1)
    assert [one.usable for one in fleet] == [True, True]
    roster.adopt(found, 20)
    roster.adopt({}, 25)
    roster.adopt({}, 54)
    assert (len(fleet), told) == (2, [])
    roster.adopt({}, 55)
    assert (len(fleet), told) == (0, ["it has left the cluster"] * 2)


def test_who_is_missing_and_does_not_answer_or_said_that_it_leaves_has_gone() -> None:
    for state, ready in (("up", False), ("leaving", True), ("down", True)):
        fleet = Fleet()
        roster = Roster(fleet)
        roster.adopt({"http://a:1": entry()}, 0)
        roster.adopt({"http://a:1": entry(state)}, 1)
        for one in fleet:
            one.ready = ready
        roster.adopt({}, 2)
        assert len(fleet) == 0


def test_an_engine_of_the_settings_that_is_missing_for_long_is_down_and_stays() -> None:
    fleet = Fleet([GivenEngine("http://a:1", "prefill", "n")])
    roster = Roster(fleet)
    [a] = fleet
    a.ready = True
    roster.adopt({}, 0)
    assert a.usable  # no membership listed it yet
    roster.adopt({"node:n": entry(role="decode")}, 1)
    roster.adopt({}, 2)
    assert a.usable
    roster.adopt({}, 40)
    assert (a.member, a.usable, len(fleet), a.role) == ("down", False, 1, "prefill")
    roster.adopt({"node:n": entry()}, 41)
    assert a.usable


def test_an_engine_that_was_started_again_for_something_else_is_asked_for_that() -> None:
    fleet = Fleet()
    roster = Roster(fleet)
    roster.adopt({"http://a:1": entry(role="decode")}, 0)
    roster.adopt({"http://a:1": entry(role="prefill")}, 1)
    assert [one.role for one in fleet] == ["prefill"]


def ranks_of(*nodes: tuple[str, int, int], state: str = "up", **labels: str) -> list[dict[str, Any]]:
    """(replica, rank, ranks), all at one address."""
    return [
        {
            "name": f"engines.{replica}.{rank}",
            "replica_name": replica,
            "rank": rank,
            "ranks": ranks,
            "host": "h",
            "state": state,
            "labels": {"http": ":1", "engine_id": f"id of {replica}", **labels},
        }
        for replica, rank, ranks in nodes
    ]


def found_at_one_address(nodes: list[dict[str, Any]]) -> Instance:
    fleet = Fleet()
    Roster(fleet).adopt(engines_of({"nodes": nodes}), 0)
    [one] = fleet
    return one


def writer() -> Instance:
    """An engine that only writes texts, and whose caches are pushed to it."""
    return Instance("http://d:1", prefills=False, decodes=True, mode="write")


def test_nodes_that_push_are_known_in_the_order_of_their_ranks() -> None:
    nodes = [("a", rank, 11) for rank in (10, 2, 0, 1, *range(3, 10))]
    one = found_at_one_address(ranks_of(*nodes, mode="write", role="prefill"))
    assert one.ranks == tuple(f"engines.a.{rank}" for rank in range(11))
    assert (one.mode, one.engine_id, one.pushes_to(writer())) == ("write", "id of a", True)


def test_an_engine_does_not_push_while_a_node_of_it_is_missing_or_does_not_say_so() -> None:
    prefill = {"role": "prefill"}
    missing = ranks_of(("a", 0, 2), mode="write", **prefill)
    silent = [*missing, *ranks_of(("a", 1, 2), **prefill)]
    twice = ranks_of(("a", 0, 2), ("a", 0, 2), mode="write", **prefill)
    several = ranks_of(("a", 0, 1), ("b", 0, 1), mode="write", **prefill)
    either = ranks_of(("a", 0, 1), mode="write")
    reads = [ranks_of(("a", 0, 1), **prefill), ranks_of(("a", 0, 1), mode="read", **prefill)]
    for nodes in (missing, silent, twice, several, either, *reads):
        one = found_at_one_address(nodes)
        assert (one.usable, one.pushes_to(writer())) == (False, False)
        one.ready = True
        assert (one.usable, one.pushes_to(writer())) == (True, False)
    former = [*ranks_of(("a", 0, 1), state="down", mode="write"), *ranks_of(("b", 0, 1), mode="write")]
    for nodes in (former, former[::-1]):
        assert found_at_one_address(nodes).ranks == ("engines.b.0",)


def test_an_engine_that_was_started_again_or_has_gone_does_not_push_as_it_did() -> None:
    fleet = Fleet([GivenEngine("http://h:1", "prefill")])
    roster = Roster(fleet)
    [one] = fleet
    pushes = engines_of({"nodes": ranks_of(("a", 0, 1), mode="write")})
    for now, found in enumerate(({}, engines_of({"nodes": ranks_of(("b", 0, 1))}), {})):
        roster.adopt(pushes, 100 * now)
        assert one.pushes_to(writer())
        roster.adopt(found, 100 * now + 1)
        roster.adopt(found, 100 * now + 40)
        assert not one.pushes_to(writer())


class Supervisor:
    """Replaces a `Cluster`. `gate`: while it is not set, nothing is placed. `away`: no call gets through."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.away = False
        self.heard: list[str] = []

    def members(self) -> dict[str, Any]:
        return {"cluster": "c", "nodes": []}

    def place(self, request: str, affinity: str | None, failed: Sequence[str]) -> Any:
        self.gate.wait(60)
        self.heard.append(" ".join((f"place {request}", *failed)))
        return SimpleNamespace(prefill=(), decode=())

    def finished(self, request: str) -> None:
        if self.away:
            raise TroupeError(ErrorCode.PEER_UNREACHABLE, "nobody is there")
        self.heard.append(f"finished {request}")


async def until(what: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit
        await asyncio.sleep(0.01)


def with_supervisor(work: Callable[[Members, Supervisor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor()
    monkeypatch.setattr("troupe.router.members.Cluster", lambda **_: supervisor)
    monkeypatch.setattr("troupe.router.members._LOOK", 0.02)
    monkeypatch.setattr("troupe.router.members._PATIENCE", 0.05)

    async def main() -> None:
        members = Members(Settings(), fleet_of())
        watch = asyncio.create_task(members.watch())
        await until(lambda: members.reachable)
        try:
            await work(members, supervisor)
        finally:
            supervisor.gate.set()
            watch.cancel()
            members.close()

    asyncio.run(main())


def test_a_supervisor_that_is_late_is_not_asked_again_until_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(members: Members, supervisor: Supervisor) -> None:
        assert members.may_place(None)
        supervisor.gate.clear()
        assert await members.place("a", None) is None
        assert not members.may_place(None)
        members.finished("a")
        await asyncio.sleep(0.1)
        assert (members.reachable, supervisor.heard) == (True, [])
        supervisor.gate.set()
        await until(lambda: members.may_place(None))
        # The supervisor counted the request after it had already ended.
        await until(lambda: supervisor.heard == ["place a", "finished a"])

    with_supervisor(work, monkeypatch)


def test_a_request_that_is_placed_once_more_names_the_nodes_that_failed_and_ends_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(members: Members, supervisor: Supervisor) -> None:
        await members.place("a", None)
        await members.place("a", None, ["prefill-0", "decode-0"])
        members.finished("a")
        await until(lambda: supervisor.heard == ["place a", "place a prefill-0 decode-0", "finished a"])
        # A request that never came to ask again was placed nevertheless.
        await members.place("b", None)
        supervisor.gate.clear()
        busy = [asyncio.create_task(members.place(str(number), None)) for number in range(8)]
        await asyncio.sleep(0)
        assert await members.place("b", None, ["decode-0"]) is None
        members.finished("b")
        supervisor.gate.set()
        await asyncio.gather(*busy)
        await until(lambda: "finished b" in supervisor.heard)
        assert "place b decode-0" not in supervisor.heard

    with_supervisor(work, monkeypatch)


def test_a_supervisor_that_was_away_hears_later_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(members: Members, supervisor: Supervisor) -> None:
        for request in ("a", "b", "c"):
            await members.place(request, None)
        supervisor.away = True
        for request in ("a", "b", "c", "unknown"):
            members.finished(request)
        await asyncio.sleep(0.1)
        supervisor.away = False
        await until(lambda: len(supervisor.heard) == 6)
        assert supervisor.heard[3:] == ["finished a", "finished b", "finished c"]

    with_supervisor(work, monkeypatch)


def test_a_membership_says_which_servers_are_there() -> None:
    def node(name: str, state: str, **labels: str) -> dict[str, Any]:
        said = {"name": name, "state": state, "host": "10.0.0.1", "replica_name": name, "fingerprint": "f"}
        return {**said, "labels": labels} if labels else said

    found = engines_of(
        {
            "nodes": [
                node("old", "down", http=":8000"),
                node("new", "up", http=":8000", role="decode"),
                node("far", "suspect", http="h.example:80"),
                node("six", "up", http="[::1]:81"),
                node("named", "up"),
                node("bad", "up", http="http://x"),
            ]
        }
    )
    assert {url: one["state"] for url, one in found.items()} == {
        "http://10.0.0.1:8000": "up",
        "http://h.example:80": "suspect",
        "http://[::1]:81": "up",
        "node:named": "up",
        "node:bad": "up",
    }
    assert found["http://10.0.0.1:8000"]["nodes"] == {"new"}
    assert found["http://10.0.0.1:8000"]["role"] == "decode"
