"""Rules for Megatron-LM's and MindSpeed-LLM's options of positions, attention and windows."""

from __future__ import annotations

import re

from pangu.interop.formats.megatron_experts import layer_pattern
from pangu.interop.formats.megatron_latent import LATENT_OPTIONS, read_scaling
from pangu.interop.translation.table import Translation

_SIZES = {key: option.replace("_", "-") for key, option in LATENT_OPTIONS.items()}
"""Options by fields of `LatentConfig`."""
_LATENT_ALONE = (
    *_SIZES.values(),
    *("rotary-scaling-factor", "rope-type", "mscale", "mscale-all-dim", "beta-fast", "beta-slow"),
)
"""Options that only mean something with `--multi-latent-attention`."""


def attention(source: Translation) -> None:
    """Fill in the overrides of positions and attention. Raises UserError for values of the wrong type."""
    if source.flag("use-rotary-position-embeddings"):
        source.set("model.positions", "rope", "use-rotary-position-embeddings")
    else:
        source.choose("position-embedding-type")
    positions = source.get("model.positions")
    if positions == "learned" and source.flag("no-position-embedding"):
        source.lacks("no-position-embedding", "other_function")
    if positions == "learned" and source.flag("embed-layernorm"):
        # there it normalizes the token embedding, before the position vectors are added
        source.lacks("embed-layernorm", "other_function")
    if positions == "rope":
        _rotary(source)
    rows = source.integer("max-position-embeddings")
    if positions == "learned" and rows not in (None, source.integer("seq-length")):
        source.differs("positions_rows")
    if heads := source.integer("num-key-value-heads"):
        source.set("model.kv_heads", heads, "num-key-value-heads")
    elif source.flag("group-query-attention"):
        source.set("model.kv_heads", source.integer("num-query-groups") or 1, "num-query-groups")
    width, heads, hidden = map(source.integer, ("kv-channels", "num-attention-heads", "hidden-size"))
    if source.flag("multi-latent-attention"):
        _latent(source)
    elif width is not None and (heads is None or width * heads != hidden):
        source.set("model.head_dim", width, "kv-channels")
    for name in () if source.flag("multi-latent-attention") else _LATENT_ALONE:
        if source.is_given([name]) and source.value(name) not in (None, *source.table.neutral.get(name, ())):
            source.lacks(name, "other_function")
    _windows(source)
    if source.is_given(["softmax-type"]) and source.value("softmax-type") != "vanilla":
        source.choose("softmax-type")


def _latent(source: Translation) -> None:
    """Set `model.latent`, whose vectors are always normed here, and which has other biases than there."""
    sizes = {key: source.count(name) for key, name in _SIZES.items()}
    source.set("model.latent", sizes, "multi-latent-attention", *_SIZES.values())
    source.overrides.pop("model.qk_norm", None)  # there it means the norms of latent vectors
    if not source.flag("qk-layernorm") or not source.flag("disable-bias-linear"):
        source.lacks("multi-latent-attention", "latent_norms")
    source.set("model.biases", False, "disable-bias-linear")


def _windows(source: Translation) -> None:
    """Set the window, and the layers without one."""
    if sides := [int(side) for word in source.words("window-size") for side in re.findall(r"-?\d{1,9}", word)]:
        if len(sides) == 2 and sides[0] >= 0 and sides[1] == 0:
            source.set("model.window", sides[0] + 1, "window-size")  # theirs leaves out the token itself
            if pattern := _layers(source, "window-attn-skip-freq", 0):
                source.set("model.full_layers", pattern, "window-attn-skip-freq")
        else:
            source.lacks("window-size", "value")


def _layers(source: Translation, name: str, chosen: int) -> int | list[int] | None:
    """Return a period of layers, or the layers whose number in a list of 0 and 1 is `chosen`."""
    text = source.text(name)
    if text is None or re.fullmatch(r"\s*\d{1,9}\s*", text):
        return source.count(name)
    pattern = layer_pattern(text, source.count("num-layers") or 1)
    if not pattern or any(one not in (0, 1) for one in pattern):
        raise source.wrong(name, "must be a number, or a list of 0 or 1 for each layer")
    return [layer for layer, one in enumerate(pattern) if one == chosen] or None


def _rotary(source: Translation) -> None:
    if base := source.number("rotary-base"):
        source.set("model.rope_base", float(base), "rotary-base")
    latent, share = source.flag("multi-latent-attention"), source.number("rotary-percent")
    if latent and share not in (None, 1):
        source.lacks("rotary-percent", "other_function")
    elif share is not None and not latent:
        source.set("model.partial_rotary_factor", float(share), "rotary-percent")
    kind = source.text("rope-scaling-type")
    if pattern := _layers(source, "no-rope-freq", 1):
        source.set("model.nope_layers", pattern, "no-rope-freq")
    if latent and kind in (None, "yarn"):
        _yarn(source, "rotary-scaling-factor" if kind is None else "rope-scaling-factor")
    elif kind not in (None, "llama3"):
        source.lacks("rope-scaling-type", "other_function")
    elif kind is not None or source.flag("use-rope-scaling"):
        numbers = {
            "factor": source.number("rope-scaling-factor"),
            "low_freq_factor": source.number("low-freq-factor") or 1.0,  # these are Megatron's defaults, of Llama 3.1
            "high_freq_factor": source.number("high-freq-factor") or 4.0,
            "original_sequence": source.integer("original-max-position-embeddings") or 8192,
        }
        source.set("model.rope_scaling", numbers, "use-rope-scaling", "rope-scaling-type")


def _yarn(source: Translation, name: str) -> None:
    """Set the scaling of latent attention, which is none with a factor of 1."""
    if (factor := source.number(name)) is None:
        return
    if source.text("rope-type") == "rope":
        if factor != 1 and source.number("mscale-all-dim"):  # it scales logits even without YaRN
            source.lacks("mscale-all-dim", "other_function")
        return
    others = ("original-max-position-embeddings", "beta-fast", "beta-slow", "mscale", "mscale-all-dim")
    options = {option.replace("-", "_"): source.number(option) for option in others}
    if (yarn := read_scaling(options | {"rotary_scaling_factor": factor}, "the options")) is None:
        return
    scaling = {key: value for key, value in vars(yarn).items() if value is not None}
    source.set("model.rope_scaling", scaling, name, "mscale", "mscale-all-dim")
