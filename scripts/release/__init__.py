"""The parts of scripts/build_release.py. Standard library only."""
