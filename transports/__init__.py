"""Where logs and blobs live: one backend per file, chosen by URL scheme."""
