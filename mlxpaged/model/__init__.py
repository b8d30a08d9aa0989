"""Models: loading them, laying out their KV, running one step. With kernels/, the only package that may import mlx."""
