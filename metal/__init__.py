"""Metal kernel texts (`*.metal` bodies, `*.h` headers). Imports nothing; `kernels/` reads the files."""
