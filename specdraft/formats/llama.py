"""The shape of a drafter's one decoder layer, as config.json files of different ages and authors give it."""

from typing import Any

from specdraft.config import SpecdraftError
from specdraft.drafters.blocks import DecoderConfig, rope_of

_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")


def shape_of(config: dict[str, Any], what: str) -> dict[str, Any]:
    """The keys that our own config.json has for it, rotary positions included.

    Raises SpecdraftError if a size is missing, or for a layer that is not Llama's.
    """
    settings = {**config, **config.get("text_config", {})}
    if missing := [name for name in _NEEDED if settings.get(name) is None]:
        raise SpecdraftError(f"{what}: config.json lacks {', '.join(missing)}")
    faults = [f"{name} {settings[name]}" for name in ("attention_bias", "mlp_bias") if settings.get(name)]
    if (count := settings.get("num_hidden_layers", 1)) != 1:
        faults.append(f"{count} layers")
    if (activation := settings.get("hidden_act", "silu")) not in ("silu", "swish"):
        faults.append(f"the activation {activation}")
    if settings.get("quantization_config"):
        faults.append("quantised weights")
    if faults:
        raise SpecdraftError(f"{what} has {', '.join(faults)}; handled is one plain layer of Llama's kind")
    heads = settings["num_attention_heads"]
    shape = DecoderConfig(
        **{name: settings[name] for name in _NEEDED},
        num_key_value_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
        rms_norm_eps=settings.get("rms_norm_eps", 1e-6),
        rope_parameters=rope_of({"rope_parameters": _rope(settings)}, what),
        max_position_embeddings=settings.get("max_position_embeddings", 2048),
    )
    return shape.servable()


def _rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in one mapping, from whichever keys the config spreads them over."""
    rope = dict(settings.get("rope_scaling") or {})
    if (kind := rope.pop("type", None)) is not None:
        rope.setdefault("rope_type", kind)
    if (factor := settings.get("partial_rotary_factor")) is not None:
        rope["partial_rotary_factor"] = factor
    given = {name: value for name, value in (settings.get("rope_parameters") or {}).items() if value is not None}
    theta = {"rope_theta": settings["rope_theta"]} if settings.get("rope_theta") is not None else {}
    return {"rope_type": "default", "rope_theta": 10000.0, **rope, **theta, **given}
