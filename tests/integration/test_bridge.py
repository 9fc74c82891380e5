"""Questions over a real bridge: each is answered once, in time, whatever happens to the connection between."""

import asyncio
import gc
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
import zmq

from bridge import client as client_module
from bridge import protocol as p
from bridge import server as server_module
from bridge.blocking import BlockingClient
from bridge.client import BridgeClient
from bridge.digest import digest
from bridge.endpoint import Connection
from bridge.errors import (
    BridgeError,
    ConfigError,
    EngineFailed,
    PeerDied,
    ProtocolMismatch,
    Refused,
    StaleVersion,
    SyncMismatch,
    Timeout,
)
from bridge.server import BridgeLimits
from bridge_helpers import TRANSPORTS, World, descriptors, generate, generated, new_world, until

TRIES = 10
"""For what shows only while something else goes on, and a machine that stalls may miss."""


@pytest.fixture(params=TRANSPORTS)
async def world(request, tmp_path) -> AsyncIterator[World]:
    async with new_world(request.param, tmp_path) as world:
        yield world


@pytest.fixture(params=TRANSPORTS)
async def small(request, tmp_path) -> AsyncIterator[World]:
    """A world whose server works on three requests at a time."""
    async with new_world(request.param, tmp_path, BridgeLimits(max_in_flight=3)) as world:
        yield world


@pytest.fixture
async def ipc(tmp_path) -> AsyncIterator[World]:
    async with new_world("ipc", tmp_path) as world:
        yield world


def publish(buffer: bytes | memoryview, **fields) -> p.PublishAdapter:
    return p.PublishAdapter(version=1, digest=digest(buffer), adapter_config={"r": 8}, **fields)


# ---- asking --------------------------------------------------------------------------------------------------------


async def test_a_question_gets_its_answer(world):
    client = await world.connect()
    assert await client.ask(generate("one")) == generated("one")


async def test_the_welcome_is_the_servers(world):
    client = await world.connect(run_id="r")
    assert client.welcome.engine == "fake"
    assert world.handler.asked[0].run_id == "r"


async def test_many_questions_at_once_get_each_its_own_answer(world):
    client = await world.connect()
    prompts = [f"prompt {number}" for number in range(500)]
    assert await asyncio.gather(*(client.ask(generate(text)) for text in prompts)) == [
        generated(text) for text in prompts
    ]
    assert sorted(world.handler.prompts()) == sorted(prompts)


async def test_many_clients_do_not_get_each_others_answers(world):
    clients = [await world.connect() for _ in range(5)]
    replies = await asyncio.gather(*(one.ask(generate(f"{at}")) for at, one in enumerate(clients) for _ in range(20)))
    assert replies == [generated(f"{at}") for at in range(5) for _ in range(20)]


@pytest.mark.parametrize("view", [bytes, memoryview])
async def test_a_big_buffer_arrives_whole(world, view):
    client = await world.connect()
    buffer = os.urandom(8 << 20)
    seen = []
    world.handler.answers[p.PublishAdapter] = None

    async def look(message, call):
        seen.append(digest(call.buffer))
        return p.Done()

    world.server._handler = look
    await client.ask(publish(buffer), view(buffer))
    assert seen == [digest(buffer)]


async def test_a_buffer_of_an_adapters_size_holds_up_neither_loop(world):
    client = await world.connect()
    buffer = bytes(100 << 20)
    request = p.PublishAdapter(version=1, digest="", adapter_config={})
    meanwhile = 0
    for _ in range(TRIES):
        publishing = asyncio.create_task(client.ask(request, buffer))
        await asyncio.sleep(0)
        while not publishing.done():
            await client.ask(generate("meanwhile"))
            meanwhile += not publishing.done()
        assert (await publishing).nbytes == len(buffer)
        if meanwhile:
            break
    assert meanwhile


async def test_requests_carry_the_epoch_of_the_welcome(world):
    client = await world.connect()
    await client.ask(generate("one"))
    assert world.handler.asked[-1].epoch == client.welcome.epoch == 7


async def test_answers_are_forgotten_once_they_arrived(world):
    client = await world.connect(on_event=lambda _: None)
    await asyncio.gather(*(client.ask(generate(f"{number}")) for number in range(50)))
    await until(
        lambda: not any(len(socket.replies) for socket in world.server._sockets.values()), "nothing is kept any more"
    )


async def test_a_server_of_another_protocol_is_a_mismatch(world):
    world.handler.protocol = 99
    with pytest.raises(ProtocolMismatch, match="99"):
        await world.connect()


@pytest.mark.parametrize("size", [p.MAX_DATA_BYTES])
async def test_a_question_too_big_for_the_server_is_refused_before_it_is_sent(world, size):
    client = await world.connect()
    with pytest.raises(Refused, match="bytes"):
        await client.ask(p.Generate(prompt=bytes(size)))
    assert await client.ask(generate("next")) == generated("next")


async def test_a_question_just_small_enough_arrives(world):
    client = await world.connect()
    around = len(p.encode(p.Generate(prompt=bytes(1 << 16), epoch=7, deadline_s=99.5))) - (1 << 16)
    prompt = "p" * (p.MAX_DATA_BYTES - around)
    assert await client.ask(generate(prompt)) == generated(prompt)
    assert len(p.encode(world.handler.asked[-1])) == p.MAX_DATA_BYTES


# ---- errors --------------------------------------------------------------------------------------------------------

ERRORS = [
    BridgeError,
    Timeout,
    PeerDied,
    ProtocolMismatch,
    Refused,
    StaleVersion,
    SyncMismatch,
    EngineFailed,
    ConfigError,
]


@pytest.mark.parametrize("cls", ERRORS)
async def test_a_handlers_error_is_raised_as_its_class_with_all_it_says(world, cls):
    client = await world.connect()
    world.handler.error = cls("What.", why="Why.", log_path="/log", log_tail="tail", remedy="Remedy.")
    with pytest.raises(BridgeError) as caught:
        await client.ask(generate("refuse"))
    assert type(caught.value) is cls
    assert str(caught.value) == str(world.handler.error)


async def test_a_handlers_bug_is_an_error_and_not_the_end(world, caplog):
    client = await world.connect()
    with pytest.raises(BridgeError, match=r"Generate failed inside the server: ZeroDivisionError\('a bug'\)"):
        await client.ask(generate("crash"))
    assert await client.ask(generate("next")) == generated("next")
    assert "a bug" in caplog.text


@pytest.mark.parametrize("answer", ["text", 7, p.Ping(), p.Shutdown(reason="\udc80")])
async def test_an_answer_that_is_no_reply_is_an_error_and_not_silence(world, answer):
    client = await world.connect()
    world.handler.answers[p.Status] = answer
    with pytest.raises(BridgeError, match="Status failed inside the server"):
        await client.ask(p.Status())


async def test_an_error_text_that_is_no_unicode_still_arrives(world):
    client = await world.connect()
    world.handler.error = Refused("no file \udc80")
    with pytest.raises(Refused, match="no file"):
        await client.ask(generate("refuse"))


async def test_a_timeout_inside_the_handler_is_not_taken_for_the_deadline(world):
    client = await world.connect()
    world.handler.answers[p.Status] = TimeoutError("the engine's")
    with pytest.raises(BridgeError, match="the engine's") as caught:
        await client.ask(p.Status())
    assert not isinstance(caught.value, Timeout)


async def test_a_handler_that_cancels_itself_is_an_error_and_not_silence(world):
    client = await world.connect()
    world.handler.answers[p.Status] = asyncio.CancelledError()
    with pytest.raises(BridgeError, match="cancelled"):
        await client.ask(p.Status())


# ---- deadlines -----------------------------------------------------------------------------------------------------


async def test_past_the_deadline_the_handler_is_cancelled_and_the_server_says_so(world, monkeypatch):
    monkeypatch.setattr(client_module, "SLACK_S", 60)
    client = await world.connect()
    with pytest.raises(Timeout, match=r"The server did not finish Generate within 0\.\d+ s"):
        await client.ask(generate("hold", deadline_s=0.2))
    assert world.handler.cancelled == ["hold"]


async def test_a_silent_server_is_a_timeout_on_the_clients_own_clock(world, monkeypatch):
    monkeypatch.setattr(client_module, "SLACK_S", 0.1)
    wire = await world.wire()
    client = await world.connect(wire.connection)
    await client.ask(generate("here"))
    wire.stall()
    with pytest.raises(Timeout, match=r"No reply to Generate within 0\.1 s") as caught:
        await client.ask(generate("one", deadline_s=0.1))
    assert "is up" in caught.value.why
    wire.flow()


async def test_work_may_take_as_much_longer_as_a_server_says_it_may_be_without_an_engine(world, monkeypatch):
    monkeypatch.setattr(client_module, "SLACK_S", -0.1)
    world.server._work_timeout = lambda _seconds: asyncio.timeout(None)  # No engine serves.
    world.handler.restart_s = 60.0
    client = await world.connect()
    patient = asyncio.create_task(client.ask(generate("hold", deadline_s=0.2)))
    await until(lambda: world.handler.asked[1:], "it is asked")
    world.handler.hang_on = p.Status  # No work: its deadline is what it says.
    with pytest.raises(Timeout):
        await client.ask(p.Status(deadline_s=0.5))
    assert not patient.done()
    world.handler.release.set()
    assert await patient == generated("hold")


def restarting(state: Literal["ready", "restarting"] = "restarting") -> p.Stats:
    return p.Stats(pulse=p.Pulse(version=0, engine_steps=0, in_flight=0, engine=state))


@pytest.mark.parametrize("slots", [3, 256])
async def test_work_that_waits_for_room_does_not_time_out_while_no_engine_serves(small, slots):
    small.server._work_timeout = lambda _seconds: asyncio.timeout(None)
    small.handler.restart_s = 600.0
    small.handler.max_in_flight = slots  # It waits for its turn, or is told that the server is busy.
    client = await small.connect()
    holding = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(3)]
    await until(lambda: small.handler.now == 3, "the server is full")
    small.server.push(restarting())
    await until(lambda: client._serving.stands_still, "the client has heard")
    late = time.monotonic() + 1
    waiting = asyncio.create_task(client.ask(generate("late", deadline_s=0.5)))
    await until(lambda: time.monotonic() > late, "its deadline has passed")
    assert not waiting.done()
    small.handler.release.set()
    assert await waiting == generated("late")
    await asyncio.gather(*holding)
    small.server.push(restarting("ready"))
    await until(lambda: not client._serving.stands_still, "an engine serves")


async def test_a_server_that_leaves_its_heartbeats_unanswered_is_gone_before_any_deadline(world, monkeypatch):
    monkeypatch.setattr(client_module, "SLACK_S", 0.1)
    monkeypatch.setattr(client_module, "SILENT_S", 1.0)
    world.handler.lease_s = 0.6
    wire = await world.wire()
    client = await world.connect(wire.connection, run_id="run")
    await client.ask(generate("here"))
    wire.stall()
    async with asyncio.timeout(30):
        with pytest.raises(PeerDied, match="has answered nothing for 1 s"):
            await client.ask(generate("one", deadline_s=600))
    wire.flow()


async def test_nobody_at_the_address_is_a_timeout(world, monkeypatch):
    monkeypatch.setattr(client_module, "SLACK_S", 0.1)
    connection = world.connection_to(world.connection.data, world.connection.control)
    await world.server.stop()
    with pytest.raises(Timeout) as caught:
        await world.connect(connection, timeout_s=0.3)
    assert "is down" in caught.value.why


@pytest.mark.parametrize("deadline_s", [0.0, -5.0, float("nan")])
async def test_a_deadline_that_has_passed_is_a_timeout_at_once(world, deadline_s):
    client = await world.connect()
    with pytest.raises(Timeout, match="had passed"):
        await client.ask(generate("one", deadline_s=deadline_s))
    assert not world.handler.prompts()


async def test_a_request_without_an_end_is_fine(world):
    client = await world.connect()
    assert await client.ask(generate("one", deadline_s=float("inf"))) == generated("one")


# ---- limits --------------------------------------------------------------------------------------------------------


async def test_a_busy_server_is_asked_again_until_it_is_free(small):
    client = await small.connect()
    asked = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(8)]
    await until(lambda: len(small.handler.prompts("hold")) == 3, "the server is full")
    small.handler.release.set()
    assert await asyncio.gather(*asked) == [generated(f"hold {number}") for number in range(8)]
    assert small.handler.most_at_once == 3
    assert len(small.handler.prompts()) == 8


async def test_a_burst_fills_the_server_instead_of_being_sent_away_whole(small):
    raw = small.raw()
    for number in range(20):
        await raw.send(raw.next_id(), p.encode(generate(f"hold {number}")))
    codes = [(await raw.receive())[1].code for _ in range(17)]
    assert codes == ["busy"] * 17
    assert small.handler.prompts() == [f"hold {number}" for number in range(3)]
    assert small.server.in_flight == 3


async def test_a_server_busy_past_the_deadline_is_a_timeout_that_says_so(small, monkeypatch):
    monkeypatch.setattr(client_module, "SLACK_S", 60)
    small.handler.restart_s = 600.0
    client = await small.connect()
    holding = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(3)]
    await until(lambda: small.handler.now == 3, "the server is full")
    with pytest.raises(Timeout) as caught:
        await client.ask(generate("one", deadline_s=0.3))
    assert "works on 3 requests already" in caught.value.why
    small.handler.release.set()
    await asyncio.gather(*holding)


async def test_a_full_data_socket_leaves_control_free(small):
    client = await small.connect()
    holding = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(3)]
    await until(lambda: small.handler.now == 3, "the server is full")
    assert (await client.ask(p.Ping())).in_flight == 3
    small.handler.release.set()
    await asyncio.gather(*holding)


async def test_a_full_server_can_still_be_told_to_cancel(small):
    client = await small.connect()
    holding = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(3)]
    await until(lambda: small.handler.now == 3, "the server is full")
    holding[0].cancel()
    await until(lambda: small.handler.cancelled == ["hold 0"], "the handler was cancelled")
    small.handler.release.set()
    await asyncio.gather(*holding[1:])


async def test_a_client_asks_no_more_at_once_than_the_welcome_allows(world):
    world.handler.max_in_flight = 2
    client = await world.connect()
    asked = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(6)]
    await until(lambda: len(world.handler.prompts()) == 2, "two are asked")
    assert (await client.ask(p.Ping())).in_flight == 2
    world.handler.release.set()
    await asyncio.gather(*asked)
    assert world.handler.most_at_once == 2


async def test_answers_that_nobody_fetches_are_bounded(tmp_path):
    async with new_world("ipc", tmp_path, BridgeLimits(reply_bytes=20_000)) as world:
        raw = world.raw()
        for number in range(200):
            await raw.ask(generate(f"{number}"))
        replies = world.server._sockets["data"].replies
        assert replies.held_bytes <= 20_000
        assert len(replies) < 100


# ---- cancelling ----------------------------------------------------------------------------------------------------


async def test_a_cancelled_question_is_cancelled_at_the_server(world):
    client = await world.connect()
    asked = asyncio.create_task(client.ask(generate("hold")))
    await until(lambda: world.handler.now == 1, "it is worked on")
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: world.handler.cancelled == ["hold"], "the handler was cancelled")
    await until(lambda: not len(world.server._sockets["data"].replies), "nothing is kept of it")


async def test_a_question_past_the_clients_deadline_is_cancelled_at_the_server(world, monkeypatch):
    monkeypatch.setattr(client_module, "SLACK_S", -0.5)
    client = await world.connect()
    with pytest.raises(Timeout):
        await client.ask(generate("hold", deadline_s=1))
    await until(lambda: world.handler.cancelled == ["hold"], "the handler was cancelled")


async def test_a_question_cancelled_while_the_server_is_busy_is_never_asked(small, monkeypatch):
    client = await small.connect()
    holding = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(3)]
    await until(lambda: small.handler.now == 3, "the server is full")
    pauses = asyncio.Event()

    async def pause(_seconds: float) -> None:
        pauses.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(client._data, "pause", pause)
    waiting = asyncio.create_task(client.ask(generate("late")))
    await until(pauses.is_set, "the server was busy")
    waiting.cancel()
    small.handler.release.set()
    await asyncio.gather(*holding)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not small.handler.prompts("late")


async def test_cancelling_what_is_not_there_is_fine(world):
    raw = world.raw()
    assert await raw.ask(p.Cancel(request_id=p.RequestId(raw.name, 99, 0).pack())) == p.Done()
    assert await raw.ask(p.Cancel(request_id=b"")) != p.Done()


async def test_a_cancelled_question_can_be_asked_again(world):
    raw = world.raw()
    request_id = raw.next_id()
    await raw.send(request_id, p.encode(generate("hold")))
    await raw.send(raw.next_id(), p.encode(p.Cancel(request_id=request_id)))
    assert {type((await raw.receive())[1]).__name__ for _ in range(2)} == {"Done", "Failure"}
    world.handler.release.set()
    await raw.send(request_id, p.encode(generate("hold")))
    assert await raw.receive() == (request_id, generated("hold"))
    assert world.server.in_flight == 0


# ---- once ----------------------------------------------------------------------------------------------------------


async def test_a_question_asked_twice_is_worked_on_once(world):
    raw = world.raw()
    request = raw.next_id(), p.encode(generate("hold"))
    await raw.send(*request)
    await raw.send(*request)
    await until(lambda: world.handler.now, "it is worked on")
    world.handler.release.set()
    first = await raw.receive()
    await raw.send(*request)
    assert await raw.receive() == first == (request[0], generated("hold"))
    assert world.handler.prompts() == ["hold"]


async def test_an_error_is_kept_like_an_answer(world):
    raw = world.raw()
    request = raw.next_id(), p.encode(generate("refuse"))
    for _ in range(2):
        await raw.send(*request)
        assert (await raw.receive())[1].what == "No."
    assert world.handler.prompts() == ["refuse"]


async def test_an_acknowledged_answer_is_not_kept(world):
    raw = world.raw()
    request = raw.next_id(), p.encode(generate("one"))
    await raw.send(*request)
    await raw.receive()
    await raw.send(request[0], p.encode(p.Ack()))
    await raw.send(*request)
    await raw.receive()
    assert world.handler.prompts() == ["one", "one"]


async def test_the_same_id_for_another_question_is_refused(world):
    raw = world.raw()
    request_id = raw.next_id()
    await raw.send(request_id, p.encode(generate("one")))
    assert (await raw.receive())[1] == generated("one")
    await raw.send(request_id, p.encode(generate("two")))
    assert (await raw.receive())[1].code == Refused.code
    assert world.handler.prompts() == ["one"]


# ---- the connection breaks -----------------------------------------------------------------------------------------


async def test_an_open_question_survives_a_broken_connection_and_is_worked_on_once(world):
    wire = await world.wire()
    client = await world.connect(wire.connection)
    asked = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(5)]
    await until(lambda: world.handler.now == 5, "they are worked on")
    before = wire.connections
    wire.cut()
    await until(lambda: wire.connections >= before + 2, "the client is back")
    world.handler.release.set()
    assert await asyncio.gather(*asked) == [generated(f"hold {number}") for number in range(5)]
    assert len(world.handler.prompts()) == 5


async def test_a_wire_that_takes_connections_and_drops_them_is_endured(world):
    wire = await world.wire()
    client = await world.connect(wire.connection)
    asked = asyncio.create_task(client.ask(generate("hold")))
    await until(lambda: world.handler.now, "it is worked on")
    before, wire.drops = wire.connections, True
    wire.cut()
    await until(lambda: wire.connections > before + 20, "many tries were dropped")
    wire.drops = False
    world.handler.release.set()
    assert await asked == generated("hold")


async def test_an_answer_given_while_nobody_listened_is_fetched_later(world):
    wire = await world.wire()
    client = await world.connect(wire.connection)
    asked = asyncio.create_task(client.ask(generate("hold")))
    await until(lambda: world.handler.now, "it is worked on")
    wire.lower()
    await until(lambda: not client._data.connected.is_set(), "the client has noticed")
    world.handler.release.set()
    await until(lambda: not world.server.in_flight, "it was answered into the void")
    await wire.open()
    assert await asked == generated("hold")
    assert world.handler.prompts() == ["hold"]


async def test_a_question_asked_without_a_connection_is_answered_when_there_is_one(world):
    wire = await world.wire()
    client = await world.connect(wire.connection)
    wire.lower()
    await until(lambda: not client._data.connected.is_set(), "the client has noticed")
    asked = asyncio.create_task(client.ask(generate("one")))
    await asyncio.sleep(0)
    await wire.open()
    assert await asked == generated("one")
    assert world.handler.prompts() == ["one"]


async def test_a_buffer_survives_a_broken_connection(world):
    wire = await world.wire()
    client = await world.connect(wire.connection)
    buffer = os.urandom(20 << 20)
    asked = asyncio.create_task(client.ask(publish(buffer), buffer))
    await asyncio.sleep(0)
    wire.cut()
    assert (await asked).nbytes == len(buffer)
    assert sum(isinstance(one, p.PublishAdapter) for one in world.handler.asked) == 1


async def test_open_questions_are_asked_of_a_new_server_on_the_same_address(world):
    client = await world.connect()
    asked = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(5)]
    await until(lambda: world.handler.now == 5, "they are worked on")
    await world.rebuild()
    await until(lambda: world.handler.now == 5, "the new server works on them")
    assert len(world.handler.cancelled) == 5
    world.handler.release.set()
    assert await asyncio.gather(*asked) == [generated(f"hold {number}") for number in range(5)]
    assert len(world.handler.prompts()) == 10


async def test_a_slow_reader_does_not_hold_up_the_others(tmp_path):
    async with new_world("ipc", tmp_path, BridgeLimits(max_in_flight=10)) as world:
        deaf = world.raw()
        assert await deaf.ask(generate("here"))
        for number in range(3000):
            await deaf.send(deaf.next_id(), p.encode(generate(f"{number}")))
        client = await world.connect()
        assert await client.ask(generate("one")) == generated("one")


# ---- events --------------------------------------------------------------------------------------------------------


def died(number: int) -> p.EngineDied:
    return p.EngineDied(why=f"{number}")


async def test_events_reach_everybody_who_subscribed_in_order(world):
    seen: list[list[p.Event]] = [[], []]
    for events in seen:
        await world.connect(on_event=events.append)
    await world.connect()
    for number in range(100):
        world.server.push(died(number))
    await until(lambda: all(len(events) == 100 for events in seen), "all have arrived")
    assert seen == [[died(number) for number in range(100)]] * 2


async def test_events_come_again_after_the_connection_broke(world):
    wire = await world.wire()
    events: list[p.Event] = []
    await world.connect(wire.connection, on_event=events.append)
    wire.lower()
    await until(lambda: not wire._ends, "the connections are gone")
    for number in range(3):
        world.server.push(died(number))
    await wire.open()

    def arrives() -> bool:
        world.server.push(died(99))
        return died(99) in events

    await until(arrives, "an event arrives")


async def test_events_come_from_a_new_server_on_the_same_address(world):
    events: list[p.Event] = []
    await world.connect(on_event=events.append)
    await world.rebuild()
    await until(lambda: world.server._subscribers, "the client has subscribed again")
    world.server.push(died(1))
    await until(lambda: events == [died(1)], "it arrives")


async def test_a_subscriber_that_went_is_forgotten(world):
    client = await world.connect(on_event=lambda _: None)
    await client.close()

    def forgotten() -> bool:
        world.server.push(died(1))
        return not world.server._subscribers

    await until(forgotten, "nobody is left")


async def test_an_event_handler_that_breaks_costs_no_answers(world, caplog):
    def broken(_event: p.Event) -> None:
        raise ZeroDivisionError("in on_event")

    client = await world.connect(on_event=broken)
    world.server.push(died(1))
    await until(lambda: "in on_event" in caplog.text, "the event came")
    assert await client.ask(generate("one")) == generated("one")


async def test_pushing_to_nobody_is_fine(world):
    world.server.push(died(1))
    await world.server.stop()
    world.server.push(died(2))


# ---- nobody is delayed ---------------------------------------------------------------------------------------------


async def test_a_slow_question_delays_no_other(world):
    client = await world.connect()
    slow = asyncio.create_task(client.ask(generate("hold")))
    assert await client.ask(generate("quick")) == generated("quick")
    assert isinstance(await client.ask(p.Ping()), p.Pulse)
    assert not slow.done()
    world.handler.release.set()
    await slow


async def test_a_flood_on_the_data_socket_does_not_delay_control(world):
    client = await world.connect()
    raw = world.raw()
    await raw.ask(generate("here"))
    answered_first = False
    for flood in range(1, 1 + TRIES):
        for _ in range(5_000):
            raw.socket.send_multipart([raw.next_id(), b"\xc1"])
        await client.ask(p.Ping())
        answered_first = world.server.dropped_frames < 5_000 * flood
        await until(lambda flood=flood: world.server.dropped_frames == 5_000 * flood, "the flood is over")
        if answered_first:
            break
    assert answered_first


# ---- the lease -----------------------------------------------------------------------------------------------------


def leases(world: World) -> int:
    return sum(isinstance(one, p.Lease) for one in world.handler.asked)


async def test_a_lease_is_renewed_as_long_as_the_client_lives(world):
    world.handler.lease_s = 0.1
    client = await world.connect(run_id="r")
    await until(lambda: leases(world) >= 3, "three renewals")
    await client.close()
    assert not client._tasks


async def test_a_lease_is_renewed_while_an_adapter_fills_the_control_connection(world):
    world.handler.lease_s = 0.1
    wire = await world.wire()
    client = await world.connect(wire.connection, run_id="r")
    wire.stall("control")
    buffer = bytes(4 << 20)
    publishing = asyncio.create_task(client.ask(publish(buffer), buffer))
    before = leases(world)
    await until(lambda: leases(world) >= before + 3, "three renewals")
    assert not publishing.done()
    wire.flow()
    assert (await publishing).nbytes == len(buffer)


@pytest.mark.parametrize("slots", [3, 256])
async def test_a_lease_is_renewed_while_the_server_is_full(small, slots):
    small.handler.lease_s = 0.1
    small.handler.max_in_flight = slots
    client = await small.connect(run_id="r")
    holding = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(5)]
    await until(lambda: small.handler.now == 3, "the server is full")
    before = leases(small)
    await until(lambda: leases(small) >= before + 3, "three renewals")
    assert small.handler.now == 3
    small.handler.release.set()
    await asyncio.gather(*holding)


async def test_a_lease_is_taken_on_either_socket(world):
    for address in (world.server.data, world.server.control):
        assert isinstance(await world.raw(address).ask(p.Lease(epoch=7)), p.Pulse)


async def test_an_onlooker_takes_no_lease(world):
    world.handler.lease_s = 0.01
    client = await world.connect()
    for _ in range(10):
        await client.ask(p.Ping())
    assert not leases(world)


@pytest.mark.parametrize("error", [BridgeError("once"), EngineFailed("restarting"), ZeroDivisionError("a bug")])
async def test_a_renewal_that_fails_once_is_tried_again(world, error):
    world.handler.lease_s = 0.1
    await world.connect(run_id="r")
    world.handler.answers[p.Lease] = error
    await until(lambda: leases(world) >= 2, "it failed twice")
    del world.handler.answers[p.Lease]
    before = leases(world)
    await until(lambda: leases(world) >= before + 2, "it goes on")


async def test_a_lease_that_is_lost_fails_every_question_by_name(world):
    world.handler.lease_s = 0.1
    client = await world.connect(run_id="r")
    world.handler.answers[p.Lease] = StaleVersion("Another trainer holds the server.")
    with pytest.raises(Refused, match="Another trainer"):
        await client.ask(generate("hold"))
    with pytest.raises(Refused, match="Another trainer"):
        await client.ask(generate("one"))


# ---- the server goes -----------------------------------------------------------------------------------------------


async def test_a_stopped_server_fails_open_questions_at_once(world):
    client = await world.connect()
    asked = asyncio.create_task(client.ask(generate("hold")))
    await until(lambda: world.handler.now, "it is worked on")
    await world.server.stop()
    with pytest.raises(PeerDied, match="stopped"):
        await asked
    assert world.handler.cancelled == ["hold"]


async def test_a_reply_given_just_before_the_stop_arrives(world):
    client = await world.connect()

    async def reply_and_stop(message, _call):
        stopping.append(asyncio.create_task(world.server.stop()))
        return p.Done()

    stopping: list[asyncio.Task] = []
    world.server._handler = reply_and_stop
    assert await client.ask(p.Shutdown()) == p.Done()
    await stopping[0]


async def test_a_handler_may_stop_its_own_server(world):
    client = await world.connect()

    async def stop(_message, _call):
        await world.server.stop()
        return p.Done()

    world.server._handler = stop
    asked = asyncio.create_task(client.ask(p.Shutdown()))
    await until(lambda: world.server._context.closed, "the server is stopped")
    asked.cancel()


async def test_a_stop_leaves_no_file(ipc):
    files = {Path(address.removeprefix("ipc://")) for address in (ipc.server.data, ipc.server.control)}
    assert all(file.is_socket() for file in files)
    await ipc.server.stop()
    assert not any(file.exists() for file in files)


async def test_a_second_stop_does_nothing_even_to_a_successor(ipc):
    await ipc.server.stop()
    old = ipc.server
    await ipc.start()
    await old.stop()
    client = await ipc.connect()
    assert await client.ask(generate("one")) == generated("one")


async def test_stops_at_once_are_one_stop(world):
    client = await world.connect()
    asked = asyncio.create_task(client.ask(generate("hold")))
    await until(lambda: world.handler.now, "it is worked on")
    first = asyncio.create_task(world.server.stop())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(*(world.server.stop() for _ in range(5)))
    assert world.server._context.closed
    with pytest.raises(PeerDied):
        await asked


async def test_a_socket_that_breaks_is_shouted_about(world, caplog):
    def breaks(**_: object) -> None:
        raise zmq.ZMQError(zmq.EFAULT)

    client = await world.connect()
    world.server._sockets["data"].zmq.recv_multipart = breaks
    await client.ask(generate("one"))
    await until(lambda: "not listened to" in caplog.text, "it is logged")


async def test_a_handler_deaf_to_cancellation_does_not_hang_the_stop(world, monkeypatch, caplog):
    monkeypatch.setattr(server_module, "STOP_S", 0.1)
    began, over = asyncio.Event(), asyncio.Event()

    async def deaf(_message, _call):
        began.set()
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue
        return p.Done()

    client = await world.connect()
    world.server._handler = deaf
    asked = asyncio.create_task(client.ask(p.Status()))
    await began.wait()
    await world.server.stop()
    assert "did not end" in caplog.text
    asked.cancel()
    over.set()
    await until(lambda: not world.server._sockets["control"].running, "the handler ends")


async def test_a_second_server_on_the_same_address_is_refused_and_harms_nobody(ipc):
    client = await ipc.connect()
    with pytest.raises(ConfigError, match="already listens"):
        await ipc.new_server().start()
    assert await client.ask(generate("one")) == generated("one")
    assert await (await ipc.connect()).ask(generate("two")) == generated("two")


async def test_a_server_whose_second_address_is_taken_gives_the_first_one_back(ipc):
    fresh = f"ipc://{ipc.folder}/fresh"
    with pytest.raises(ConfigError, match="already listens"):
        await ipc.new_server(data=fresh, control=ipc.server.control).start()
    assert not (ipc.folder / "fresh").exists()
    assert await (await ipc.connect()).ask(p.Ping())


async def test_a_port_in_use_is_a_config_error(tmp_path):
    async with new_world("tcp", tmp_path) as world:
        with pytest.raises(ConfigError, match="Address already in use") as caught:
            await world.new_server(data=world.server.data).start()
        assert "Another program" in caught.value.why


async def test_a_stale_socket_file_is_replaced(tmp_path):
    async with new_world("ipc", tmp_path) as world:
        await world.rebuild()
        assert await (await world.connect()).ask(generate("one")) == generated("one")


@pytest.fixture(params=["a zombie", "collected"])
def dead_child(request):
    """The pid of a child that has ended."""
    with subprocess.Popen(["/bin/true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if request.param == "collected":
            child.wait()
        yield child.pid


async def test_the_end_of_the_servers_process_is_noticed_long_before_any_deadline(ipc, dead_child):
    (ipc.folder / "server.log").write_text("its last words")
    wire = await ipc.wire()
    connection = Connection(
        data=wire.connection.data,
        control=wire.connection.control,
        server_uuid="",
        pid=dead_child,
        log_path=str(ipc.folder / "server.log"),
    )
    client = await ipc.connect(connection)
    asked = asyncio.create_task(client.ask(generate("hold", deadline_s=600)))
    await until(lambda: ipc.handler.now, "it is worked on")
    wire.lower()
    with pytest.raises(PeerDied, match="is gone") as caught:
        async with asyncio.timeout(60):
            await asked
    assert caught.value.log_tail == "its last words"
    with pytest.raises(PeerDied):
        await client.ask(generate("one"))


async def test_a_dead_process_is_noticed_before_the_first_connection(ipc, dead_child):
    ipc.pid = dead_child
    connection = ipc.connection_to(f"ipc://{ipc.folder}/no", f"ipc://{ipc.folder}/body")
    with pytest.raises(PeerDied):
        await ipc.connect(connection, timeout_s=600)


async def test_a_server_that_lives_but_listens_no_more_is_noticed(world, monkeypatch):
    monkeypatch.setattr(client_module, "GONE_S", 0.5)
    monkeypatch.setattr(client_module, "GONE_REMOTE_S", 0.5)
    wire = await world.wire()
    client = await world.connect(wire.connection)
    asked = asyncio.create_task(client.ask(generate("hold", deadline_s=600)))
    await until(lambda: world.handler.now, "it is worked on")
    wire.lower()
    with pytest.raises(PeerDied, match=r"has not listened for 0\.5 s"):
        async with asyncio.timeout(60):
            await asked


# ---- the client goes -----------------------------------------------------------------------------------------------


async def test_a_closed_client_fails_open_questions_and_ends_them_at_the_server(world):
    client = await world.connect()
    asked = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(3)]
    await until(lambda: world.handler.now == 3, "they are worked on")
    await client.close()
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(outcome, PeerDied)
    await until(lambda: len(world.handler.cancelled) == 3, "the handlers were cancelled")


async def test_a_closed_client_answers_nothing_and_closes_twice(world):
    client = await world.connect()
    await asyncio.gather(client.close(), client.close())
    for request in (generate("one"), p.Ping()):
        with pytest.raises(PeerDied, match="closed"):
            await client.ask(request)


async def test_a_close_that_is_cancelled_is_still_done(world):
    client = await world.connect()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: client._context.closed, "it is closed")


async def test_a_question_that_waits_for_a_busy_server_ends_with_the_client(small):
    client = await small.connect()
    asked = [asyncio.create_task(client.ask(generate(f"hold {number}"))) for number in range(5)]
    await until(lambda: small.handler.now == 3, "the server is full")
    await client.close()
    assert [type(one) for one in await asyncio.gather(*asked, return_exceptions=True)] == [PeerDied] * 5


async def test_a_connect_that_is_cancelled_leaves_nothing(world):
    await world.server.stop()
    before = tasks()
    connecting = asyncio.create_task(BridgeClient.connect(world.connection))
    await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert tasks() == before


@pytest.mark.parametrize("address", ["nonsense", "ipc://", "udp://127.0.0.1:1", ""])
async def test_an_address_that_is_none_is_a_config_error_and_leaves_nothing(address):
    before = tasks()
    connection = Connection(data="ipc:///nowhere/data", control=address, server_uuid="", pid=1)
    with pytest.raises(ConfigError):
        await BridgeClient.connect(connection)
    await until(lambda: tasks() == before, "no task is left")


def tasks() -> set[asyncio.Task]:
    return asyncio.all_tasks()


# ---- nothing is left -----------------------------------------------------------------------------------------------


async def test_servers_and_clients_leak_no_task_no_thread_and_no_descriptor(tmp_path):
    async def life(transport: str) -> None:
        async with new_world(transport, tmp_path) as world:
            client = await world.connect(run_id="r", on_event=lambda _: None)
            await client.ask(generate("one"))
            await client.ask(p.PublishAdapter(version=1, digest="", adapter_config={}), bytes(1 << 20))
            asked = asyncio.create_task(client.ask(generate("hold")))
            await until(lambda: world.handler.now, "it is worked on")
            with await asyncio.to_thread(BlockingClient.connect, world.connection) as blocking:
                assert await asyncio.to_thread(blocking.ask, generate("two")) == generated("two")
            asked.cancel()

    async def count() -> tuple[int, int, int]:
        gc.collect()
        pool = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())  # The loop's, for ever.
        return len(tasks()), len(list(Path("/proc/self/task").iterdir())) - pool, descriptors()

    for transport in TRANSPORTS:
        await life(transport)
    before = await count()
    for _ in range(3):
        for transport in TRANSPORTS:
            await life(transport)
    after = await count()
    for _ in range(600):  # What ends by itself may take a while.
        if all(now <= then for now, then in zip(after, before, strict=True)):
            break
        await asyncio.sleep(0.1)
        after = await count()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
