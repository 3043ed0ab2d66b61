"""From a batch manifest to the next policy version: advantages, packing, losses and training backends."""
