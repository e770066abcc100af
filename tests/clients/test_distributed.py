"""What ranks of `torch.distributed` agree on, with a group of one rank; `test_sharded` has more."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from deltabus import Group, Publisher
from deltabus.bus.core import LogWriter
from deltabus.bus.errors import SignatureError, UsageError
from deltabus.bus.message import Kind, Stats
from deltabus.bus.signing import Scheme, SigningKey
from deltabus.distributed import agree_on_group
from deltabus.transports import open_transport

from .ranks import make_weights
from .support import LIMIT

KEY, OTHER = (SigningKey(Scheme.ED25519, bytes([number]) * 32) for number in (1, 2))


@pytest.fixture
def rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


async def say(url, writer, generation, key=None):
    """Append a message of a generation to a log, unsigned unless there is a key."""
    async with open_transport(url) as transport:
        log = LogWriter(transport, writer, group=Group([writer], generation), key=key)
        await log.open()
        await log.commit(
            kind=Kind.ANCHOR,
            step=1,
            version=1,
            base={},
            schema=await log.store_schema(b"{}"),
            digest_before=None,
            digest_after=1,
            blobs=[await log.store(b"x", name="x")],
            stats=Stats(changed=0, total=0),
        )


async def test_only_signed_messages_say_which_generations_were_used(tmp_path, rank):
    url, group = tmp_path.as_uri(), Group.of_ranks("trainer", 1, generation=3)
    assert agree_on_group(url) == ("trainer-0", Group.of_ranks("trainer", 1, generation=1))
    with Publisher(url, writer="trainer-0", group=group, key=KEY, workers=1) as publisher:
        publisher.publish(1, make_weights()).result(LIMIT)
    await say(url, "trainer-7", 5, KEY)  # a rank that left
    for options in ({"key": KEY}, {"key": OTHER, "keys": KEY.verify_key}, {}):
        assert agree_on_group(url, **options)[1].generation == 6
    await say(url, "trainer-9", 1 << 40)
    assert agree_on_group(url)[1].generation == (1 << 40) + 1
    for use in (agree_on_group, Publisher):
        with pytest.raises(SignatureError, match="trainer-9"):
            use(url, **({"key": KEY} if use is agree_on_group else {"key": KEY, "group": "ranks"}))
    with pytest.raises(UsageError, match="key="):
        agree_on_group(url, key="no key")
