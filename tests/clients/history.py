"""What a topic on disk must hold after whatever happened to its trainer, and what it does hold.

The states are found from the topic's files by the codec alone, without the readers that are tested elsewhere.
"""

from deltabus import Subscriber
from deltabus.bus.message import Kind, decode_message
from deltabus.cli.verify import verify_topic
from deltabus.codecs.apply import Target
from deltabus.codecs.container import decode_anchor, decode_delta
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Shadow

from .support import LIMIT, fingerprint, small_model, train


def model_at(step):
    model = small_model()
    for earlier in range(step + 1):
        train(model, earlier)
    return model


def messages_in(topic):
    """The messages of the trainer's log, in order; its positions must have no hole."""
    files = sorted(path for path in (topic / "logs" / "trainer").glob("*") if not path.name.startswith("."))
    assert [int(path.name) for path in files] == list(range(len(files)))
    return [
        decode_message(path.read_bytes(), writer="trainer", position=position) for position, path in enumerate(files)
    ]


def states_in(topic):
    """The messages of the trainer's log, each with the fingerprint of the state that it leads to."""
    model, shadows, found = small_model(), {}, []
    for message in messages_in(topic):
        schema = Schema.decode((topic / message.schema.key).read_bytes())
        parts = [(topic / blob.key).read_bytes() for blob in message.blobs]
        shadow = Shadow.empty(schema)
        if message.kind is Kind.ANCHOR:
            for index, bits in decode_anchor(parts, schema):
                shadow.load(index, bits)
        else:
            base = shadows[message.base["trainer"]]
            for segment in schema.segments:
                shadow.load(segment.index, base.read(segment.index))
            shadow.advance(decode_delta(parts, schema, base.read))
        shadows[message.version] = shadow
        Target.bind(model, schema).load(shadow.read)
        found.append((message, fingerprint(model)))
    return found


def follow(topic):
    """What a reader has that starts from nothing."""
    model = small_model(99)
    for update in Subscriber(topic, idle_timeout=LIMIT, workers=1).sync():
        update.apply(model)
        return fingerprint(model), update.version
    raise AssertionError("the topic brought nothing")


def check_topic(topic, told):
    """Check that a topic is whole and holds what was told, and return its messages with their states."""
    found = states_in(topic)
    assert told <= {(message.version, message.step, print_) for message, print_ in found}
    assert len({(message.version, print_) for message, print_ in found}) == len({m.version for m, _ in found})
    if found:
        report = verify_topic(topic.as_uri())
        assert (report.ok, report.replayed, report.unreachable) == (True, len(found), 0), report.problems
        newest, print_ = max(found, key=lambda pair: pair[0].version)
        assert follow(topic) == (print_, newest.version)
    return found
