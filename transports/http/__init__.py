"""`http://host:port/topic` and `https://`: both ends. Importing this package imports the client's end alone.

wire.py       what the ends say to each other

settings.py   what a URL says
session.py    requests, and which of our errors a failure is
client.py     a topic as a `Transport`
follow.py     records as they come

service.py    the application: what is served, and how it starts and stops
routes.py     from paths to what is done
sending.py    blobs and records on their way out
taking.py     bodies on their way in
topics.py     the topics that are open, each on its backend
feeds.py      one tail of each log for all who follow it
cache.py      blobs on disk, within a limit
flights.py    one fetch of a blob for all who ask for it
access.py     who may do what
limits.py     how much anybody may do
transcode.py  topics that are made of others, by processes that it watches
tracing.py    OpenTelemetry spans of requests
ledger.py     what is known of a topic: versions, readers, sizes
metrics.py    figures for Prometheus
page.py       the page for people, page.html
"""

from .client import HttpTransport

__all__ = ["HttpTransport"]
