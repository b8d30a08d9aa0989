"""The test suite; a package, so that a test can import tests.emulator whichever way pytest was started."""
