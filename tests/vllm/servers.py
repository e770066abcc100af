"""Real vLLM servers on this machine's CPU, one after the other: each takes about 2 GB, and half a minute to start."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests

UP_SECONDS = 600
LONG = 1000
"""Tokens of a text that takes seconds."""
HERE = Path(__file__).parent

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class Server:
    """A running server, and what can be asked of it."""

    def __init__(self, url, process, log):
        self.url, self.process, self.log = url, process, log

    def post(self, path, body=None, *, timeout=120):
        answer = requests.post(self.url + path, json=body, timeout=timeout)
        assert answer.status_code == 200, f"{path}: {answer.text}\n{self.log.read_text()[-3000:]}"
        return answer.json()

    def checksums(self):
        return self.post("/weight_checker", {"action": "checksum"})["checksums"]

    def version(self):
        return requests.get(f"{self.url}/weight_info", timeout=60).json()["weight_version"]

    def paused(self):
        return requests.get(f"{self.url}/is_paused", timeout=60).json()["is_paused"]

    def completions(self):
        """Tokens and logprobs of greedy text for some prompts."""
        body = {"prompt": ["w1 w2 w3", "w9 w8", "w100 w7 w7 w7"], "max_tokens": 12, "temperature": 0, "logprobs": 3}
        choices = self.post("/v1/completions", {"model": "tiny", **body})["choices"]
        return [
            (choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]) for choice in choices
        ]


@contextlib.contextmanager
def serving(model, place, *, ranks=1):
    """Run a server until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place.mkdir(parents=True, exist_ok=True)
    log = place / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", str(LONG + 24), "--max-num-seqs", "4"]
    command += ["--weight-transfer-config", '{"backend": "deltabus"}']
    settings = dict(ENVIRONMENT)
    if ranks == 1:
        command += ["--distributed-executor-backend", "uni"]
    else:
        command += ["-tp", str(ranks)]
        settings |= {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*map(str, command)], stdout=out, stderr=out, env=os.environ | settings, start_new_session=True
        )
        try:
            server = Server(f"http://127.0.0.1:{port}", process, log)
            wait_until_up(server)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_up(server):
    end = time.monotonic() + UP_SECONDS
    while time.monotonic() < end:
        assert server.process.poll() is None, server.log.read_text()[-5000:]
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(f"{server.url}/health", timeout=10).status_code == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"the server was not up within {UP_SECONDS} s:\n{server.log.read_text()[-5000:]}")


def deltabus(*arguments, timeout=240):
    """Run the command, and return what it prints."""
    command = [sys.executable, "-m", "deltabus.cli", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@contextlib.contextmanager
def driving(server, topic):
    """Drive a server until the block ends; what is told of each update comes in a queue."""
    command = [sys.executable, "-m", "deltabus.cli", "drive", "vllm", server.url, "--follow", topic, "--json"]
    told = queue.Queue()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=lambda: [told.put(json.loads(line)) for line in process.stdout])
        reader.start()
        try:
            yield told
        finally:
            process.terminate()
            reader.join()
