"""Train Medusa heads; the same as `specdraft train`, in a form that launchers start.

accelerate launch recipes/train_medusa.py --config configs/medusa-smollm2-135m.yaml training.learning_rate=3e-4
"""

from specdraft.cli import launch

if __name__ == "__main__":
    launch("train")
