"""Tensor parallelism: one model over several processes, each with a share of its KV heads."""
