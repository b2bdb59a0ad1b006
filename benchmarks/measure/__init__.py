"""What benchmarks/data_plane.py measures, and what it makes of the figures."""
