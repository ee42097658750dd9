"""Warp-specialised attention kernels in Gluon, for Hopper."""
