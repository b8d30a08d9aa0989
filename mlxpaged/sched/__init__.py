"""Who runs next and where their KV lies: requests, blocks, the state table, the scheduler. numpy only, never mlx."""
