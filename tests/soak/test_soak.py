"""Real processes and real servers under faults drawn from a seed: nothing lost, nothing mixed, nothing undetected.

In the suite a few faults on files; `make soak` takes ten minutes over all backends, `make soak SECONDS=60 SEED=7` a
minute with the faults of that seed.
"""

import os
import random
from pathlib import Path

import pytest

from ..clients.backends import BACKENDS, open_backend
from ..clients.players import Company
from .soak import Soak

SECONDS = float(os.environ.get("DELTABUS_SOAK_SECONDS") or 0)
SEED = int(os.environ.get("DELTABUS_SOAK_SEED") or (random.randrange(10**6) if SECONDS else 1))
LEASE = 20.0 if SECONDS else 3.0
FAULTS = 16
"""How many at least; all there are in the suite."""
pytestmark = pytest.mark.timeout(300 + 3 * SECONDS)


@pytest.fixture(scope="module")
def company(tmp_path_factory):
    with Company(tmp_path_factory.mktemp("home"), Path(__file__).with_name("parts.py")) as company:
        company.wait()
        yield company


@pytest.mark.parametrize("scheme", BACKENDS if SECONDS else ["file"])
async def test_nothing_is_lost_mixed_or_undetected(scheme, company, tmp_path):
    print(f"\n{scheme}, seed {SEED}")
    with open_backend(scheme, tmp_path / "server") as backend:
        (tmp_path / "saved").mkdir()
        soak = Soak(backend, company, tmp_path / "saved", seed=SEED, lease=LEASE)
        await soak.play(SECONDS / len(BACKENDS), least=FAULTS)
    print(*soak.report(), sep="\n")
    ledger = soak.ledger
    assert not (ledger.lost or ledger.mixed or ledger.undetected), (ledger.lost, ledger.mixed, ledger.undetected)
    assert soak.faults.total() >= FAULTS and ledger.durable and ledger.states
    assert soak.removed or not SECONDS
