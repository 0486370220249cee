"""Run folders of pangu: config.yaml and the newest checkpoint in checkpoints/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pangu.checkpoint.files import Slice, checkpoint_path, commit, start, write_slices
from pangu.checkpoint.index import find_damage, read_index
from pangu.checkpoint.reading import newest_checkpoint, read_tensor, read_yaml, trained_model
from pangu.checkpoint.run_folder import CHAT_TEMPLATE, GENERATION, identity, keep_tokenizer, kept_tokenizer, save_config
from pangu.common.errors import UserError
from pangu.common.files import read_json_object
from pangu.config.data import IndexedData
from pangu.config.model import ModelConfig
from pangu.data.boundaries import packing_with_ids
from pangu.data.tokenizers import load_tokenizer
from pangu.interop.formats.card import card_name, write_card
from pangu.interop.formats.stored import Job, Stored, Training, WeightSource
from pangu.layers.expert_balance import ExpertBalance
from pangu.metrics.record import read_records
from pangu.models.parameters import is_of_mtp, logical_shapes
from pangu.optim.loss_scale import LossScale
from pangu.prepare.chat import ChatPrompts, kept_template
from pangu.topology.layout import Layout


class PanguSource(WeightSource):
    """Run folder, or one checkpoint in it. Raises UserError if there is none or it is damaged."""

    def __init__(self, path: Path) -> None:
        """Open and check the checkpoint."""
        self._path = newest_checkpoint(path)
        self._index = read_index(self._path)
        if damage := find_damage(self._path, self._index):
            raise UserError("\n".join(damage))
        config = trained_model(self._path, self._index)
        self.model_keys = dict(vars(config.model))
        self.packing = dict(vars(config.data.packing))
        run = self._path.resolve().parent.parent
        kept = read_json_object(run / GENERATION) if (run / GENERATION).is_file() else {}
        self.generation = {name: values for name, values in kept.items() if isinstance(values, dict)}
        step = self._index.get("step", 0)
        records = [record for record in read_records(run / "metrics.jsonl") if record["step"] <= step]
        self.training = Training(read_yaml(run / "config.yaml"), records) if records else None
        if config.model.experts is not None:
            self.balance = ExpertBalance(config.model)
            self.balance.restore(self._path, self._index.get("experts"))
        self.tensors = {
            name.removeprefix("weight/"): torch.empty(
                entry["shape"], dtype=getattr(torch, entry["dtype"]), device="meta"
            )
            for name, entry in self._index["tensors"].items()
            if name.startswith("weight/")
        }
        self.tokenizer = kept_tokenizer(run, config.data)
        self.chat_template = kept_template(run, config.data)
        if self.chat_template is not None and self.tokenizer is not None:
            opened = load_tokenizer(self.tokenizer)
            ids = packing_with_ids(config.data.packing, opened, own_end=True)
            chat = ChatPrompts(self.chat_template, opened, ids.eod)
            ends = (token for token in (*ids.stop, *chat.stop) if token != ids.eod)
            self.packing["stop"] = tuple(dict.fromkeys(ends))

    def table(self, model: ModelConfig) -> list[Stored]:
        """Return the tensors of a model in this format."""
        return table(model, 1)

    def inspect(self, table: Sequence[Stored], problems: list[str]) -> Mapping[str, Tensor]:
        """Return the tensors, without those of multi-token prediction if `table` has none."""
        names, layers = {stored.name for stored in table}, self.model_keys["layers"]
        return {name: x for name, x in self.tensors.items() if name in names or not is_of_mtp(name, layers)}

    def read(self, stored: Stored) -> Tensor:
        """Return one full tensor."""
        return read_tensor(self._path, self._index, f"weight/{stored.name}")


def table(model: ModelConfig, tensor: int) -> list[Stored]:
    """Return the tensors of a model, each stored as it is."""
    return [Stored(name, (name,), shape) for name, shape in logical_shapes(model).items()]


def write(path: Path, job: Job) -> None:
    """Write a run folder with a checkpoint of step 0, which holds weights only."""
    path.mkdir(parents=True)
    data = job.config.data
    assert isinstance(data, IndexedData)
    tokenizer = job.tokenizer
    if tokenizer is not None and tokenizer.path:
        # under the name that the folder will have in the end
        tokenizer = replace(tokenizer, path=str(job.output.resolve() / keep_tokenizer(path, tokenizer)))
    config = replace(job.config, data=replace(data, tokenizer=tokenizer))
    checkpoint = checkpoint_path(path / "checkpoints", 0)
    start(checkpoint)
    described = [
        (f"weight/{stored.name}", Slice(tensor, stored.shape, (0,) * tensor.dim()))
        for stored, tensor in zip(job.table, job.described, strict=True)
    ]
    written = write_slices(checkpoint, 0, described, job.contents)
    facts: dict[str, Any] = {
        "step": 0,
        "skipped": 0,
        "samples": 0,
        "loss_scale": LossScale(config.precision.loss_scale).state(),
        "identity": identity(config),
        "layout": asdict(Layout()),
    }
    if config.model.experts is not None:
        facts["experts"] = (job.balance or ExpertBalance(config.model)).state()
    commit(checkpoint, [written], facts)
    if job.source.chat_template is not None:
        (path / CHAT_TEMPLATE).write_text(job.source.chat_template, encoding="utf-8")
    if job.source.generation:
        (path / GENERATION).write_text(json.dumps(job.source.generation, indent=2), encoding="utf-8")
    save_config(path, config)
    name = card_name(job)
    usage = (
        f"`pangu generate {name} --prompt TEXT` loads this folder; a run starts from it with `checkpoint.init_from`."
    )
    write_card(path / "README.md", job, config.model.kind, usage)
