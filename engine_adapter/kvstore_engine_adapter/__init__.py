"""Engines that plug into the store; the bundled paged-attention runtime."""
