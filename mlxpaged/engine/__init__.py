"""The loop: schedule, launch, wait, commit; text in and out; the one thread that owns MLX."""
