"""The default test suite: `bash scripts/test.sh`."""
