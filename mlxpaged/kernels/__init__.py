"""Launchers of the Metal kernels: one file per kernel, with shape checks and a plain-MLX reference beside it."""
