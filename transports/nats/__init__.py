"""`nats://host:port/topic`: topics on NATS servers with JetStream.

settings.py     what the URL says: servers, log-in, TLS, limits
session.py      one connection, until it is lost, and the answers that are awaited on it
connection.py   one session after another
faults.py       which of our errors an answer of the server is
jetstream.py    the requests of JetStream that are used here
streams.py      where things are, and what the streams must be like
chunks.py       bytes that are too large for one message
blobs.py        blobs
log.py          records: who may append, and where they are
tail.py         records as they come
transport.py    all of it as a `Transport`
notifier.py     announcements of what is stored elsewhere
"""

from .transport import NatsTransport

__all__ = ["NatsTransport"]
