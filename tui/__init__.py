"""The full-screen face: several live sessions over one backend."""
