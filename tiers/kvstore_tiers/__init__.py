"""Tiers: places that hold copies of blocks (dram arena, ssd, remote, vram page slots)."""
