"""What a topic on disk holds, found out without the readers that are tested elsewhere: from its files, by the codec."""

from deltabus.bus.message import Kind, decode_message
from deltabus.codecs.apply import Target
from deltabus.codecs.container import decode_anchor, decode_delta
from deltabus.codecs.schema import Schema
from deltabus.codecs.shadow import Shadow

from .support import fingerprint, small_model


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
