"""Bits: schemas, change detection, encodings, containers, digests and apply. Synchronous, without I/O."""
