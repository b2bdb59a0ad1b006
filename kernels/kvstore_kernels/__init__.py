"""Kernels of the bundled runtime and their references."""
