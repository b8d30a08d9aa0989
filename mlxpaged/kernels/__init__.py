"""Launchers of the Metal kernels: one file per kernel, with its shape checks and a plain float64 reference beside."""
