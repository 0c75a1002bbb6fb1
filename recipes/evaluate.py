"""Measure a drafter; the same as `specdraft eval`."""

from specdraft.cli import launch

if __name__ == "__main__":
    launch("eval")
