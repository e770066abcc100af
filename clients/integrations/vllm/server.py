"""The HTTP interface of a vLLM server, as far as updates of weights need it; tested with vLLM 0.32.0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from deltabus.bus.errors import EngineError

__all__ = ["VllmServer"]

_MOST_WORDS = 400
"""Characters that are shown of what a server answers."""


class VllmServer:
    """One server, started with `VLLM_SERVER_DEV_MODE=1`.

    Args:
        session: Connections are made in it.
        url: Such as `http://host:8000`.
        timeout: Limit in seconds for each request.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, *, timeout: float) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._limit = timeout

    async def open(self, init_info: Mapping[str, Any]) -> None:
        """Let all workers follow a topic.

        Raises:
            EngineError: If the server cannot be reached, or refuses.
        """
        await self._post("/init_weight_transfer_engine", {"init_info": dict(init_info)})

    async def command(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Have each worker do something, and return what each says.

        Raises:
            EngineError: As `open` does.
        """
        said = await self._post("/collective_rpc", {"method": "deltabus", "args": [json.dumps(command)]})
        results = said.get("results")
        if not isinstance(results, list) or not results or not all(isinstance(each, dict) for each in results):
            raise EngineError(
                f"{self.url} answers {said!r} to deltabus; start it with "
                '--weight-transfer-config \'{"backend": "deltabus"}\' where deltabus is installed',
                url=self.url,
            )
        return results

    async def pause(self, mode: str) -> None:
        """Let no request go on.

        Raises:
            EngineError: As `open` does.
        """
        await self._post(f"/pause?mode={mode}")

    async def resume(self) -> None:
        """Let requests go on.

        Raises:
            EngineError: As `open` does.
        """
        await self._post("/resume")

    async def start(self) -> None:
        """Begin an update.

        Raises:
            EngineError: As `open` does.
        """
        await self._post("/start_weight_update")

    async def update(self, update_info: Mapping[str, Any]) -> None:
        """Write the update, in all workers.

        Raises:
            EngineError: As `open` does.
        """
        await self._post("/update_weights", {"update_info": dict(update_info)})

    async def finish(self, version: str | None) -> None:
        """End an update, and name the version that the engine has now.

        Raises:
            EngineError: As `open` does.
        """
        await self._post("/finish_weight_update", {"weight_version": version})

    async def set_version(self, version: str) -> None:
        """Name the version that the engine has.

        Raises:
            EngineError: As `open` does.
        """
        await self._post("/update_weight_version", {"new_version": version})

    async def reset_prefix_cache(self) -> None:
        """Let go of what was computed with older weights; requests that hold some of it compute theirs anew.

        Raises:
            EngineError: As `open` does, or if the server keeps some of it.
        """
        for query in ("", "?reset_running_requests=true"):
            if (await self._post(f"/reset_prefix_cache{query}")).get("success"):
                return
        raise EngineError(f"{self.url} does not let go of its prefix cache", url=self.url)

    async def _post(self, path: str, body: object = None) -> dict[str, Any]:
        try:
            async with self._session.post(self.url + path, json=body, timeout=self._timeout) as answer:
                text = await answer.text()
        except TimeoutError as error:
            raise EngineError(f"{self.url}{path} did not answer within {self._limit:g} s", url=self.url) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{self.url} cannot be reached: {error}", url=self.url) from error
        if answer.status == 404:
            raise EngineError(
                f"{self.url} has no {path.partition('?')[0]}; start it with VLLM_SERVER_DEV_MODE=1", url=self.url
            )
        if answer.status != 200:
            raise EngineError(f"{self.url}{path} answers {answer.status}: {_words_of(text)}", url=self.url)
        try:
            said = json.loads(text) if text else {}
        except ValueError as error:
            raise EngineError(f"{self.url}{path} answers no JSON: {_words_of(text)}", url=self.url) from error
        return said if isinstance(said, dict) else {"answer": said}


def _words_of(text: str) -> str:
    """Return the message of an error's answer."""
    try:
        said = json.loads(text)
        said = said.get("error", said) if isinstance(said, dict) else said
        text = str(said.get("message", said)) if isinstance(said, dict) else str(said)
    except ValueError:
        pass
    text = " ".join(text.split())
    return text if len(text) <= _MOST_WORDS else text[:_MOST_WORDS] + "..."
