"""How much faster, and is it the same answer? `evaluate` measures, a `Report` says how it knows."""

from specdraft.evaluation.measure import evaluate
from specdraft.evaluation.prompts import Prompt
from specdraft.evaluation.recipe import EvalRecipe
from specdraft.evaluation.report import Estimate, Report
from specdraft.evaluation.stage import EvaluateRecipe, evaluate_recipe
from specdraft.evaluation.systems import ChainSystem, StaticTreeSystem, TreeSystem

__all__ = [
    "ChainSystem",
    "Estimate",
    "EvalRecipe",
    "EvaluateRecipe",
    "Prompt",
    "Report",
    "StaticTreeSystem",
    "TreeSystem",
    "evaluate",
    "evaluate_recipe",
]
