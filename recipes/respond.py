"""Have the target answer prompts; the same as `specdraft respond`."""

from specdraft.cli import launch

if __name__ == "__main__":
    launch("respond")
