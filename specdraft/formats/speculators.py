"""EAGLE-3 in the speculators project's layout, which names the target: vLLM serves the folder alone.

Tensors are those of `safeailab`, with `layers.0.` in the place of `midlayer.`; the decoder layer's shape stands in
`transformer_layer_config`, how to draft in `speculators_config`.
"""

from specdraft.config import SpecdraftError
from specdraft.formats import safeailab
from specdraft.formats.contents import Contents, Folder, Naming
from specdraft.formats.safeailab import TAPS
from specdraft.target import FrozenTarget

VERSION = "0.9.0"
_OUTSIDE = ("architectures", "draft_vocab_size", "norm_before_residual", TAPS, "eagle_config", "specdraft")
_SWITCHES = ("norm_before_fc", "fc_norm", "norm_output")


def recognise(folder: Folder) -> bool:
    return "speculators_model_type" in folder.config


def to_theirs(ours: Contents, naming: Naming) -> Contents:
    config = safeailab.to_theirs(ours, naming).config
    layer = {name: value for name, value in config.items() if name not in _OUTSIDE}
    method = {"proposal_type": "greedy", "speculative_tokens": config["specdraft"]["unroll"]}
    return Contents(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": VERSION,
            "draft_vocab_size": config["draft_vocab_size"],
            "norm_before_residual": config["norm_before_residual"],
            **dict.fromkeys(_SWITCHES, False),
            "target_hidden_size": config["specdraft"]["target_hidden_size"],
            TAPS: config[TAPS],
            "tie_word_embeddings": False,
            "torch_dtype": config["torch_dtype"],
            "transformer_layer_config": layer,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{**method, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
                "verifier": {
                    "name_or_path": naming.target_name,
                    "architectures": [type(naming.target.model).__name__],
                },
            },
            "specdraft": config["specdraft"],
        },
        {safeailab.under_layers(name): tensor for name, tensor in ours.tensors.items()},
    )


def to_ours(theirs: Contents, target: FrozenTarget) -> Contents:
    config = theirs.config
    if (kind := config.get("speculators_model_type")) == "mtp":
        raise SpecdraftError(
            "this is speculators' checkpoint of MTP modules in training, which no engine loads: stitch it into its "
            "verifier with `speculators stitch-mtp`, and import what that writes, whose layout is mtp"
        )
    if kind != "eagle3":
        raise SpecdraftError(f"speculators_model_type is {kind!r}; handled is 'eagle3'")
    if missing := [name for name in ("transformer_layer_config", "norm_before_residual") if name not in config]:
        raise SpecdraftError(
            f"config.json lacks {', '.join(missing)}; without norm_before_residual vLLM takes it for true and "
            "speculators for false: write down with what it was trained"
        )
    if len({"d2t", "t2d"} & theirs.tensors.keys()) == 1:
        raise SpecdraftError("of d2t and t2d there is only one; speculators keeps both, or neither")
    outside = {
        name: value for name, value in config.items() if name not in ("transformer_layer_config", "architectures")
    }
    return safeailab.to_ours(Contents({**config["transformer_layer_config"], **outside}, theirs.tensors), target)
