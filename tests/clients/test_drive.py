"""Engines of one and two ranks follow a topic over HTTP: all or nothing, and none waits for another."""

import asyncio
import json

import pytest
from aiohttp import web
from safetensors.torch import save_file

from deltabus import Publisher
from deltabus.bus.errors import UsageError, WaitTimeoutError
from deltabus.cli.drive import drive_servers
from deltabus.integrations.vllm.driver import DriveSettings, drive

from .engine_server import EngineServer
from .engines import bits, checkpoint, fresh, train
from .support import LIMIT


@pytest.fixture
def topic(tmp_path):
    return (tmp_path / "topic").as_uri()


@pytest.fixture
def base(tmp_path):
    tensors = checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


class Watched:
    """What a driver tells, and a way to wait for it."""

    def __init__(self):
        self.told = []
        self._changed = asyncio.Event()

    def tell(self, driven):
        self.told.append(driven)
        self._changed.set()

    async def until(self, condition):
        async with asyncio.timeout(LIMIT):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def is_at(server, tensors):
    ranks = len(server.models)
    return all(bits(m) == bits(fresh(tensors, rank=r, ranks=ranks)) for r, m in enumerate(server.models))


def publish_a_step(topic, tensors):
    """Publish a state, and the one that a step of training leads to, which the tensors hold afterwards."""
    with Publisher(topic, on_busy="wait") as publisher:
        publisher.publish(0, tensors)
        train(tensors, 1)
        publisher.publish(1, tensors)
        publisher.flush()


async def test_replicas_follow_and_a_dead_one_stalls_nobody(tmp_path, topic, base):
    one, two = EngineServer(base, tmp_path / "model.safetensors"), EngineServer(base, tmp_path / "model.safetensors", 2)
    tensors = {name: tensor.clone() for name, tensor in base.items()}
    watched = Watched()
    async with one.serving(), two.serving():
        with Publisher(topic, on_busy="wait") as publisher:
            publisher.publish(0, tensors)
            publisher.flush()
            urls = [one.url, two.url, "http://127.0.0.1:9"]
            driving = asyncio.create_task(drive(urls, DriveSettings(topic=topic, timeout=20), tell=watched.tell))
            try:
                for step in range(3):
                    if step:
                        train(tensors, step)
                        publisher.publish(step, tensors)
                        publisher.flush()
                    await watched.until(lambda at=step + 1: [one.version, two.version] == [str(at)] * 2)
                    assert is_at(one, tensors)
                    assert is_at(two, tensors)
            finally:
                driving.cancel()
                await asyncio.gather(driving, return_exceptions=True)
    assert not one.paused
    assert not two.paused
    dead = [driven for driven in watched.told if driven.failure]
    assert {driven.server for driven in dead} == {urls[2]}
    assert "cannot be reached" in dead[0].failure
    assert dead[0].behind == 1
    assert one.calls.count("pause") == 2, "the checkpoint was recognised, so step 0 is no update"


@pytest.mark.parametrize("path", ["update_weights", "reset_prefix_cache", "finish_weight_update"])
async def test_a_failed_update_leaves_all_ranks_at_the_old_weights_and_the_next_goes_on(tmp_path, topic, base, path):
    server = EngineServer(base, tmp_path / "model.safetensors", 2)
    tensors = {name: tensor.clone() for name, tensor in base.items()}
    watched, failed = Watched(), []

    def fail(called):
        if called == path and server.active[0] and not failed:
            failed.append((server.paused, is_at(server, base)))
            if path == "update_weights":
                server.workers[0].write({"trainer": 2}, timeout=1)  # one rank writes, and the other never does
                assert not is_at(server, base)
            raise RuntimeError("injected")

    server.before = fail
    async with server.serving():
        publish_a_step(topic, tensors)
        seen = []

        def tell(driven):
            seen.append((bool(driven.failure), is_at(server, base), is_at(server, tensors), server.paused))
            watched.tell(driven)

        assert await drive([server.url], DriveSettings(topic=topic, timeout=20, once=True), tell=tell)
    assert seen == [(True, True, False, False), (False, False, True, False)]
    assert "injected" in watched.told[0].failure
    assert server.version == "2"


async def test_a_new_driver_puts_right_what_a_dead_one_left(tmp_path, topic, base):
    server = EngineServer(base, tmp_path / "model.safetensors", 2)
    tensors = {name: tensor.clone() for name, tensor in base.items()}
    async with server.serving():
        publish_a_step(topic, tensors)
        await asyncio.to_thread(
            server.do_init_weight_transfer_engine, {"url": topic, "keys": None, "shadow": None, "constants": []}
        )
        server.do_pause()
        server.do_start_weight_update()
        await asyncio.to_thread(server.workers[0].write, {"trainer": 2}, timeout=LIMIT)  # and there it died
        assert await drive([server.url], DriveSettings(topic=topic, timeout=20, once=True), tell=lambda driven: None)
        assert is_at(server, tensors)
        assert not server.paused


PATHS = ["pause", "start_weight_update", "update_weights", "reset_prefix_cache", "finish_weight_update", "resume"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_driver_that_is_cancelled_lets_requests_go_on(tmp_path, topic, base, path):
    server = EngineServer(base, tmp_path / "model.safetensors", 2)
    tensors = {name: tensor.clone() for name, tensor in base.items()}
    held, go = asyncio.Event(), asyncio.Event()

    def hold(called):
        if called == path and (server.paused or called == "pause"):
            held.set()
            return asyncio.wait_for(go.wait(), LIMIT)
        return None

    server.before = hold
    async with server.serving():
        publish_a_step(topic, tensors)
        driving = asyncio.create_task(drive([server.url], DriveSettings(topic=topic, timeout=20), tell=print))
        await asyncio.wait_for(held.wait(), LIMIT)
        for _ in range(2):
            driving.cancel()
            await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(driving, LIMIT)
        assert not server.paused
        assert server.active == [False, False]
        assert is_at(server, tensors), "what was begun is finished"


async def test_an_engine_whose_weights_drifted_is_refused_and_then_made_good(tmp_path, topic, base):
    server = EngineServer(base, tmp_path / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in base.items()}
    settings = DriveSettings(topic=topic, timeout=20, once=True)
    told, seen = [], []
    with Publisher(topic, on_busy="wait") as publisher:
        publisher.publish(0, tensors)
        publisher.publish(1, train(tensors, 1))
    async with server.serving():
        assert await drive([server.url], settings, tell=lambda driven: None)
        server.models[0].qkv.data.add_(1)
        drifted = bits(server.models[0])
        with Publisher(topic, have=tensors) as publisher:
            publisher.publish(2, train(tensors, 2))

        def tell(driven):
            told.append(driven)
            seen.append(bits(server.models[0]))

        assert await drive([server.url], settings, tell=tell)
        assert "'qkv'" in told[0].failure
        assert seen[0] == drifted
        assert not told[1].failure
        assert is_at(server, tensors)


async def test_every_wait_has_a_limit(tmp_path, topic, base):
    server = EngineServer(base, tmp_path / "model.safetensors")
    with pytest.raises(WaitTimeoutError, match="brought no state"):
        await drive(["http://127.0.0.1:9"], DriveSettings(topic=topic, timeout=0.2, once=True), tell=print)
    with Publisher(topic) as publisher:
        publisher.publish(0, base)
    told = []
    async with server.serving():
        never = asyncio.Event()
        server.before = lambda path: never.wait() if path == "init_weight_transfer_engine" else None
        assert not await drive([server.url], DriveSettings(topic=topic, timeout=0.3, once=True), tell=told.append)
        never.set()
    assert all("did not answer within 0.3 s" in driven.failure for driven in told)


async def test_servers_of_another_kind_are_told_apart(topic, base, tmp_path):
    with Publisher(topic) as publisher:
        publisher.publish(0, base)

    async def answer(request):
        return web.json_response({"results": ["?"]}) if request.path == "/collective_rpc" else web.json_response({})

    app = web.Application()
    app.router.add_post("/collective_rpc", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    told = []
    try:
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        assert not await drive([url], DriveSettings(topic=topic, timeout=5, once=True), tell=told.append)
    finally:
        await runner.cleanup()
    assert "weight-transfer-config" in told[0].failure


def test_the_command_says_what_happened(topic, base, capsys):
    with Publisher(topic) as publisher:
        publisher.publish(0, base)
    with pytest.raises(UsageError, match="each server once"):
        drive_servers(["http://127.0.0.1:9"] * 2, DriveSettings(topic=topic), as_json=False)
    with pytest.raises(UsageError, match="mode"):
        DriveSettings(topic=topic, mode="stop")
    assert not drive_servers(["http://127.0.0.1:9"], DriveSettings(topic=topic, timeout=5, once=True), as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == [0, 0]
