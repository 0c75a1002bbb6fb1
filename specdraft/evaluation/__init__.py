"""How much faster, and is it the same answer? `evaluate` measures, a `Report` says how it knows."""

from specdraft.evaluation.measure import ChainSystem, EvalRecipe, TreeSystem, evaluate
from specdraft.evaluation.prompts import Prompt
from specdraft.evaluation.report import Estimate, Report

__all__ = ["ChainSystem", "Estimate", "EvalRecipe", "Prompt", "Report", "TreeSystem", "evaluate"]
