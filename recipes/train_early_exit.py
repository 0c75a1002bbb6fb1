"""Train an adapter at an early exit of the target; the same as `specdraft train`, in a form that launchers start.

accelerate launch recipes/train_early_exit.py --config configs/early-exit-smollm2-135m.yaml drafter.exit=12
"""

from specdraft.cli import launch

if __name__ == "__main__":
    launch("train")
