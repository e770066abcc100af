"""An engine behind vLLM's routes for updates of weights, with real workers: as many ranks as wanted, in one process."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager

from aiohttp import web

from deltabus.integrations.vllm.worker import EngineWorker

from .engines import fresh


class EngineServer:
    """Keeps the rules of vLLM's server: an update is begun once, and a worker that fails has ended its own.

    Attributes:
        calls: Paths that were posted to, in order.
        before: Called with each path before it is served; what it raises is the answer.
        paused: Whether requests wait.
        version: The name of the weights.
    """

    def __init__(self, tensors, checkpoint, ranks=1):
        self.models = [fresh(tensors, rank=rank, ranks=ranks) for rank in range(ranks)]
        self.workers = [EngineWorker(model) for model in self.models]
        self.checkpoint = checkpoint
        self.active = [False] * ranks
        self.calls = []
        self.before = lambda path: None
        self.paused = False
        self.version = ""
        self.url = ""
        self._opening = threading.Lock()  # vLLM's workers do one thing at a time
        self._serving = False

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/{path}", self.serve)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        self._serving = True
        try:
            yield self
        finally:
            await runner.cleanup()
            await asyncio.to_thread(self._close)

    def _close(self):
        with self._opening:
            self._serving = False
            for worker in self.workers:
                worker.close()

    async def serve(self, request):
        path = request.match_info["path"]
        self.calls.append(path)
        body = await request.json() if request.can_read_body else {}
        handler = getattr(self, f"do_{path}", None)
        if handler is None:
            return web.json_response({"error": "no such path"}, status=404)
        try:
            waits = self.before(path)
            if waits is not None:
                await waits
            answer = await asyncio.to_thread(handler, **(body or {}))
        except Exception as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)
        return web.json_response(answer or {})

    def do_init_weight_transfer_engine(self, init_info):
        with self._opening:
            for worker in self.workers if self._serving else ():
                worker.open(**init_info, checkpoint=self.checkpoint)

    def do_collective_rpc(self, method, args):
        assert method == "deltabus"
        said = [worker.command(json.loads(args[0])) for worker in self.workers]
        return {"results": [{**each, "active": active} for each, active in zip(said, self.active, strict=True)]}

    def do_pause(self):
        self.paused = True

    def do_resume(self):
        self.paused = False

    def _each(self, work):
        """Every rank works, as they do in parallel, and then the first failure is told."""
        failures = []
        for rank in range(len(self.workers)):
            try:
                work(rank)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def do_start_weight_update(self):
        def start(rank):
            assert not self.active[rank], "already active"
            self.workers[rank].check_open()
            self.active[rank] = True

        self._each(start)

    def do_update_weights(self, update_info):
        def update(rank):
            assert self.active[rank], "not started"
            assert self.paused
            try:
                self.workers[rank].write(**update_info)
            except BaseException:
                self.active[rank] = False
                raise

        self._each(update)

    def do_finish_weight_update(self, weight_version=None):
        def finish(rank):
            assert self.active[rank], "finish without start"
            self.workers[rank].commit()
            self.active[rank] = False

        self._each(finish)
        self.version = weight_version or self.version

    def do_update_weight_version(self, new_version):
        self.version = new_version

    def do_reset_prefix_cache(self):
        return {"success": True}
