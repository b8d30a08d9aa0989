"""mlxpaged: paged-attention inference on MLX for several live sessions. Importing it imports nothing heavy."""

__version__ = "0.1.0"
