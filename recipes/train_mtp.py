"""Train MTP modules; the same as `specdraft train`, in a form that launchers start.

accelerate launch recipes/train_mtp.py --config configs/mtp-smollm2-135m.yaml training.learning_rate=3e-4
"""

from specdraft.cli import launch

if __name__ == "__main__":
    launch("train")
