"""`report.json` is read by others: a key that goes, or changes its name, is a new schema version."""

from specdraft.evaluation.report import SCHEMA_VERSION, Report

KEYS = {
    "Acceptance": (
        "acceptance_ratio accepted alpha analytic_alpha calibration depths emitted_histogram emitted_per_pass "
        "iid_departure iid_tau proposed rounds slices tau"
    ),
    "BatchSpeed": "batch_size batches decode_speedup predicted speedup",
    "Bin": "accepted confidence high low nodes target",
    "Calibration": "bins error nodes",
    "Costs": (
        "best_gamma break_even_alpha by_gamma c draft_step_seconds nodes pass_seconds predicted_speedup rest_seconds "
        "round_cost v"
    ),
    "Counts": "accepted draft_tokens drafts per_position",
    "Curve": "name steps values",
    "DepthFigures": "alpha analytic_alpha depth offer offers reach",
    "Divergence": "gap plain_token position prompt rounding speculative_token top2_margin",
    "Estimate": "high low value",
    "GammaPoint": "gamma measured predicted_speedup tau",
    "Losslessness": "compared divergences ks_distance p_value reason verdict",
    "Piece": "kind round text",
    "Report": "created definitions plain provenance samples schema_version served setting systems training warnings",
    "RunTime": "drafter_seconds new_tokens passes prefill_seconds seconds target_seconds",
    "Sample": "category pieces prompt system tau",
    "Served": "answers engine ours prompts reason system theirs unequal",
    "Setting": (
        "acceptance answers batch_size categories controls device drafter drafter_weights dtype hardware "
        "max_new_tokens prompts seed target target_fingerprint temperature threads top_k top_p trained_length "
        "training_overlap"
    ),
    "Slice": "alpha analytic_alpha kind name prompts rounds tau",
    "SystemReport": (
        "acceptance by_batch costs decode_speedup losslessness name predicted shape speedup stops_paying time"
    ),
    "Unequal": "ours prompt theirs",
}
"""Each section's, of version 1. A key that comes needs a default, so that older reports can still be read, and a line
here; one that goes, or means something else, needs another version."""


def test_keys_of_the_report_are_those_of_its_version() -> None:
    schema = Report.model_json_schema()
    sections = {"Report": schema, **{name: part for name, part in schema["$defs"].items() if "properties" in part}}
    assert SCHEMA_VERSION == 1
    assert {name: sorted(part["properties"]) for name, part in sections.items()} == {
        name: keys.split() for name, keys in KEYS.items()
    }
