"""A Hugging Face Hub with storage buckets, and the Xet store behind it, on one machine, for tests and demos.

It speaks the wire protocols of both, so that the real `huggingface_hub` and `hf_xet` run against it unchanged:

    formats.py   the binary formats of Xet: xorbs and shards
    store.py     the content-addressed store
    buckets.py   which names lead to which content, and the journal of every change
    faults.py    faults that tests order, and the log of requests
    access.py    who may do what
    cas_api.py   the store's HTTP interface
    hub_api.py   the Hub's HTTP interface
    feed.py      the change feed
    app.py       all of it as one application

It checks how chunks are framed, how long terms are and that xorbs exist. It does not recompute hashes, and offers no
deduplication beyond what a client knows by itself.
"""
