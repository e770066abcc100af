"""`hf://buckets/...` against the stand-in Hub, through the real clients: the contract."""

import pytest

from .conformance import TransportConformance

pytestmark = pytest.mark.usefixtures("hub_clients")


class TestHubTransport(TransportConformance):
    rounds = 4  # each append takes a while, so that nobody decides too soon
    examples = 10
    many = 60

    @pytest.fixture
    def make_topic(self, hub_topics):
        return lambda: hub_topics(settle=0.03)
