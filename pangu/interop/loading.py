"""Loading of trained models for evaluation, on any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pangu.checkpoint.files import Slice
from pangu.checkpoint.index import read_index
from pangu.checkpoint.reading import load_weights, newest_checkpoint, trained_model
from pangu.checkpoint.run_folder import kept_tokenizer
from pangu.collectives.reduce import gather_objects
from pangu.collectives.regions import TensorRegion
from pangu.common.errors import ConfigError, Problem, UserError
from pangu.config.data import InstructionsData, StreamData
from pangu.config.layout_checks import shared_matrices
from pangu.config.model import ModelConfig
from pangu.config.model_checks import find_model_problems
from pangu.data.boundaries import begin_id, packing_with_ids
from pangu.data.tokenizers import Tokenizer, load_tokenizer
from pangu.evaluation.inference import LoadedModel
from pangu.interop.formats.convert import logical_tensors, stored_balance
from pangu.interop.formats.fields import refuse
from pangu.interop.formats.huggingface import HuggingFaceSource, put_tokenizer_end_first
from pangu.layers.builder import DTYPES, Builder
from pangu.layers.initial import replace_parameter
from pangu.layers.kernel_choice import attention_kernels
from pangu.metrics.devices import require_format
from pangu.models.language_model import LanguageModel, Options, build_model
from pangu.models.parameters import ModelPart
from pangu.pipeline.runner import Runner
from pangu.pipeline.stages import cut
from pangu.prepare.chat import kept_template
from pangu.schedule.schedule import Schedule, forward_only, make_schedule
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable


@dataclass(frozen=True)
class _Source:
    model: ModelConfig
    precision: str
    """Compute format by default."""
    tokenizer: Tokenizer | None
    packing: Mapping[str, Any]
    """Keys of `PackingConfig`, as far as they are known, with ids."""
    fill: Callable[[Iterable[tuple[str, Slice]]], object]
    """Function that fills slices of logical tensors with the weights."""
    experts: Any = None
    """State of `ExpertBalance`, for a model with experts."""
    kernel: str | None = None
    """Attention kernel that the run chose as the fastest, if it had a choice."""
    read_template: Callable[[], str | None] = lambda: None
    """See `LoadedModel.read_template`."""


def load_model(path: Path, mesh: Mesh, precision: str | None = None, *, rows: int = 8) -> LoadedModel:
    """Load the weights of a model, and nothing else, for evaluation: no dropout, no gradients.

    Args:
        path: Run folder (its newest checkpoint is loaded), checkpoint in it, or folder of Hugging Face's
            transformers (see `pangu.interop.formats.huggingface`), of which no code is run.
        mesh: Mesh of any layout that the model supports, whatever layout wrote the checkpoint.
        precision: Compute format; None: that of the run, or of the folder.
        rows: Number of texts computed at a time.

    Raises:
        UserError: On all ranks, there is no intact checkpoint, or the layout does not fit the model.
    """
    source = _exported(path) if (path / "config.json").is_file() else _of_run(path, mesh)
    config = replace(source.model, attention="auto", dropout=0.0, attention_dropout=0.0, mtp_layers=0)
    compute = precision or source.precision
    if mesh.device.type != "cpu":
        require_format(compute, mesh.device)
    schedule, parts = _stages(config, mesh)
    region = replace(TensorRegion.of(mesh), sequence=False)
    kernels = attention_kernels(config, compute, mesh.device)
    # nothing is timed here: the same question has the same answer, to the last bit
    options = Options(source.kernel if source.kernel in kernels else kernels[0])
    chunks = {mesh.at.pipeline: parts[mesh.at.pipeline]}
    model, table = build_model(config, options, Builder(region=region), list(chunks.values()))
    source.fill(_slices(model, table, DTYPES[compute], mesh.device))
    if (balance := model.balance_on(mesh.device)) is not None and source.experts is not None:
        balance.restore(path, source.experts, common=True)
    runner = Runner.on(mesh, model, chunks, forward_only(schedule, 1), DTYPES[compute], region)
    ids = (source.packing["eod"], rows, source.packing["stop"], source.packing["bos"])
    return LoadedModel(runner, schedule, mesh, config, source.tokenizer, *ids, source.read_template)


def _of_run(path: Path, mesh: Mesh) -> _Source:
    checkpoint = gather_objects(_checkpoint(path), mesh.group("world"))[0]
    index = read_index(checkpoint)
    trained = trained_model(checkpoint, index)
    run = checkpoint.resolve().parent.parent
    tokenizer = kept_tokenizer(run, trained.data)
    opened = load_tokenizer(tokenizer) if tokenizer else None
    own_end = isinstance(trained.data, (StreamData, InstructionsData))
    # what is fast where probabilities are dropped says nothing of evaluation, which drops none
    kernel = None if trained.model.attention_dropout else (index.get("choices") or {}).get("attention")
    return _Source(
        trained.model,
        trained.precision.compute,
        opened,
        vars(packing_with_ids(trained.data.packing, opened, own_end=own_end)),
        lambda weights: load_weights(checkpoint, mesh, weights, trained.model.layers),
        index.get("experts"),
        kernel if isinstance(kernel, str) else None,
        lambda: kept_template(run, trained.data),
    )


def _exported(path: Path) -> _Source:
    source = HuggingFaceSource(path)
    unknown = dict.fromkeys(("kv_heads", "rope_base", "relative_buckets", "relative_distance"))
    model = ModelConfig(**{**unknown, "attention": "auto", **source.model_keys, "mtp_layers": 0})
    refuse(path / "config.json", find_model_problems(model))
    _, read = logical_tensors(source, model)
    balance = stored_balance(source, model, read)
    dtype = next(iter(source.tensors.values())).dtype

    def fill(weights: Iterable[tuple[str, Slice]]) -> None:
        for name, part in weights:
            places = zip(part.offsets, part.tensor.shape, strict=True)
            part.tensor.copy_(read(name)[tuple(slice(start, start + size) for start, size in places)])

    tokenizer = load_tokenizer(source.tokenizer) if source.tokenizer else None
    packing = source.packing if tokenizer is None else put_tokenizer_end_first(source.packing, tokenizer)
    return _Source(
        model,
        next(name for name, format_ in DTYPES.items() if format_ == dtype),
        tokenizer,
        {**packing, "bos": begin_id(packing["bos"], tokenizer)},
        fill,
        None if balance is None else balance.state(),
        read_template=lambda: source.chat_template,
    )


def _checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest one of the run folder `path`."""
    newest = newest_checkpoint(path)
    if newest == path and not (path / "index.json").exists():
        if not path.exists():
            kinds = "a run folder, a checkpoint, or the folder of a transformers model from `hf download`"
            raise UserError(f"{path}: does not exist, and nothing is downloaded; give {kinds}")
        rule = "neither a run folder (no checkpoints/step-...) nor a checkpoint (no index.json)"
        raise UserError(f"{path}: {rule} nor a transformers model (no config.json)")
    return newest


def _stages(config: ModelConfig, mesh: Mesh) -> tuple[Schedule, tuple[ModelPart, ...]]:
    """Return a schedule and one chunk of layers per stage. Raises ConfigError if the layout does not fit the model."""
    layout = mesh.layout
    problems = list(shared_matrices(config, layout.tensor))
    if layout.pipeline > config.layers:
        rule = f"each stage needs at least one of model.layers = {config.layers}"
        problems.append(Problem("parallel.pipeline", layout.pipeline, rule, f"use 1 to {config.layers}"))
    if problems:
        raise ConfigError(problems)
    return make_schedule("gpipe", layout.pipeline, 1, 1), cut(config, layout.pipeline)


def _slices(
    model: LanguageModel, table: PlacementTable, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Slice]]:
    """Materialize a model from the meta device; yield its logical tensors, to be filled."""
    for name, parameter in list(model.named_parameters()):
        stored = torch.zeros(parameter.shape, dtype=dtype, device=device)
        replace_parameter(model, name, stored).requires_grad_(False)
        for placement in table.stored_in(name):
            flat = stored.view(-1)[placement.offset : placement.offset + placement.local_numel]
            yield placement.name, Slice(flat.view(placement.local_shape), placement.shape, placement.offsets)
