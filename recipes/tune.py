"""Find what to draft; the same as `specdraft tune`."""

from specdraft.cli import launch

if __name__ == "__main__":
    launch("tune")
