"""deltabus: model weights from a trainer to inference engines as tiny, lossless, versioned deltas."""
