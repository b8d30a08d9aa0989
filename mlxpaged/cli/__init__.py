"""The command line: composes an engine or a remote, a backend and a face. Heavy imports live inside functions."""
