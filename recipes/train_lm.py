"""Train a draft LM; the same as `specdraft train`, in a form that launchers start.

accelerate launch recipes/train_lm.py --config configs/lm-smollm2-135m.yaml training.learning_rate=3e-4
"""

from specdraft.cli import launch

if __name__ == "__main__":
    launch("train")
