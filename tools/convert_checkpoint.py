"""Converts a checkpoint between pangu's own format and those of Hugging Face, Megatron and MindSpore, tensor by tensor.

pangu: a run folder, or a checkpoint in one; the output is a run folder. huggingface: a folder of transformers, of
one of the types that --model-types prints. megatron: the folder that --load names (GPT of
Megatron-Core in either of its formats, and the PanGu-α port of Megatron 1.1). mindspore: a .ckpt file, or a folder with
the slices, the strategy file and the .npy tables of PanGu-α."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.common.commands import as_typed
from pangu.common.errors import UserError, printable, shown
from pangu.common.exit_status import exit_status
from pangu.config.build import build
from pangu.config.checks import check
from pangu.config.data import IndexedData
from pangu.config.schema import RunConfig
from pangu.data.boundaries import begin_id, describe_ids
from pangu.data.other_tokenizers import ENCODINGS
from pangu.data.tokenizers import load_tokenizer
from pangu.interop.formats.convert import FORMATS, MEGATRON, convert, settle_model, settle_packing
from pangu.interop.formats.huggingface import HuggingFaceSource, put_tokenizer_end_first
from pangu.interop.formats.huggingface_config import kinds
from pangu.interop.formats.stored import WeightSource
from pangu.interop.hub import HUB_NAME, HubRepository
from pangu.metrics.progress import ProgressBar
from pangu.models.size import num_parameters
from pangu.training.command import compose

_EXAMPLE = """examples:
  python tools/convert_checkpoint.py --from pangu --to huggingface --input runs/quickstart --output export/quickstart
  python tools/convert_checkpoint.py --from mindspore --to pangu --input pangu_2.6B/ --output runs/released \\
      model=pangu_2_6b "data.tokenizer={kind: pangu, path: vocab.model}"

Most files describe their full model; MindSpore's and PanGu-α's for Megatron may lack the number of heads. Values given
as for pretrain.py must agree with the files where they shape the model and win elsewhere (e.g. model.activation).
"""
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class _ModelTypes(argparse.Action):
    """Prints the types of transformers that can be read, and how many of its causal types they are where it is here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """End the program."""
        print("\n".join(kinds()))
        with suppress(ImportError):
            from transformers.models.auto import modeling_auto as auto  # noqa: PLC0415 - optional package

            causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
            print(f"{len(causal & kinds().keys())} of the {len(causal)} causal types of transformers")
        parser.exit()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=as_typed(_EXAMPLE), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="source", choices=FORMATS, required=True, help="format of the input")
    parser.add_argument("--to", dest="target", choices=FORMATS, required=True, help="format of the output")
    parser.add_argument("--input", type=Path, required=True, help="files to convert")
    parser.add_argument("--output", type=Path, required=True, help="new folder (mindspore: file NAME.ckpt)")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks of Megatron output (1)")
    parser.add_argument(
        "--megatron-format",
        choices=MEGATRON,
        default="torch",
        help="Megatron's --ckpt-format for Megatron output: torch: per-rank files; torch_grouped: the same for "
        "--moe-grouped-gemm; torch_dist: for any layout and both kinds of experts (torch)",
    )
    parser.add_argument("--license", help="license for the model card, e.g. apache-2.0")
    parser.add_argument("--push-to-hub", metavar="ORG/NAME", help="upload the output of --to huggingface, privately")
    parser.add_argument("--public", action="store_true", help="make the repository readable by everyone")
    parser.add_argument("--model-types", action=_ModelTypes, nargs=0, help="print transformers' types and exit")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. model=pangu_2_6b or model.heads=32")
    options = parser.parse_intermixed_args(arguments)
    dist = options.megatron_format == "torch_dist"
    if options.megatron_format != "torch" and options.target != "megatron":
        parser.error(f"--megatron-format {options.megatron_format}: needs --to megatron, not {options.target}")
    if options.license is not None and not re.fullmatch("[a-z0-9][a-z0-9.-]*", options.license):
        rule = "must be an identifier of the Hugging Face hub, e.g. apache-2.0"
        parser.error(f"--license {shown(options.license)}: {rule}")
    hub = options.push_to_hub
    if hub is not None and options.target != "huggingface":
        parser.error(f"--push-to-hub {shown(hub)}: needs --to huggingface, not {options.target}")
    if hub is not None and not HUB_NAME.fullmatch(hub):
        parser.error(f"--push-to-hub {shown(hub)}: must be ORG/NAME, e.g. my-lab/quickstart")
    if options.public and hub is None:
        parser.error("--public: needs --push-to-hub ORG/NAME")
    if options.target == "mindspore" and options.output.suffix != ".ckpt":
        parser.error(f"--output {options.output}: must end in .ckpt for MindSpore, e.g. {options.output}.ckpt")
    if options.tensor < 1 or (options.tensor > 1 and (dist or not FORMATS[options.target].ranks)):
        parser.error(f"--tensor {options.tensor}: must be 1, or more with --to megatron --megatron-format torch")
    return options


def configure(source: WeightSource, overrides: Sequence[str], output: Path) -> RunConfig:
    """Return the configuration that follows from the files and the overrides.

    Raises:
        UserError: if they contradict each other, or a needed key is in neither.
    """
    pangu = source.model_keys["kind"] == "pangu"
    presets = {"model": "pangu_2_6b" if pangu else "gpt2_124m", "data": "indexed_pangu" if pangu else "indexed_gpt2"}
    names = {override.split("=")[0].lstrip("+") for override in overrides}
    recipe = "config" in names
    defaults = [f"{group}={name}" for group, name in presets.items() if not {group, "config"} & names]
    values = compose(_CONFIGS, [*defaults, "validation.every=0", "dry_run=true", f"train.output={output}", *overrides])
    config = build(RunConfig, values)
    if not isinstance(config.data, IndexedData):
        raise UserError(f"data.kind = {config.data.kind}: must be indexed; set data={presets['data']}")
    named = {name.removeprefix("model.") for name in names if name.startswith("model.")}
    if recipe or "model" in names:
        named |= vars(config.model).keys()
    model = settle_model(source.model_keys, config.model, named)
    tokenizer = config.data.tokenizer or source.tokenizer
    known = source.packing
    if tokenizer is not None and (isinstance(source, HuggingFaceSource) or not known):
        with suppress(UserError):  # one that cannot be loaded here is copied all the same
            opened = load_tokenizer(tokenizer)
            if known:
                known = put_tokenizer_end_first(known, opened)
            else:  # Megatron's and MindSpore's files name no ids, and a preset's are another vocabulary's
                named_ids = " ".join(word for word in overrides if word.startswith("data.packing"))
                known = {"eod": opened.eod} if opened.eod is not None and "eod" not in named_ids else {}
                known |= {"pad": None} if tokenizer.kind != "pangu" and "pad" not in named_ids else {}
    packing = settle_packing(known, config.data.packing, model.vocab)
    data = replace(config.data, packing=packing, tokenizer=tokenizer)
    config = replace(config, model=model, data=data)
    check(config, world=1)
    return replace(config, dry_run=False)


def settle_mtp(source: WeightSource, config: RunConfig, target: str) -> RunConfig:
    """Return the configuration with multi-token prediction if both files hold it; say what is left out."""
    found, asked = source.model_keys.get("mtp_layers", 0), config.model.mtp_layers
    kept = asked if asked and found and FORMATS[target].predicts(config.model) else 0
    if (most := max(found, asked)) > kept:
        reason = f"as given, {asked} of {found} are kept" if kept == asked else "files of this model have none here"
        print(f"model.mtp_layers = {most}: left out; {reason}")
    return replace(config, model=replace(config.model, mtp_layers=kept))


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises UserError and then leaves no output."""
    card = [Path(f"{options.output}.md")] * (options.target == "mindspore")  # next to the file; others write a folder
    for path in (options.output, *card):
        if path.exists():
            raise UserError(f"--output {options.output}: {path} exists already; choose another output")
    if not options.input.exists():
        raise UserError(f"--input {options.input} does not exist, and nothing is downloaded; give a folder or file")
    # before the conversion, which may take an hour
    hub = HubRepository(options.push_to_hub) if options.push_to_hub else None
    source = FORMATS[options.source].open(options.input)
    config = configure(source, options.overrides, options.output)
    config = settle_mtp(source, config, options.target)
    assert isinstance(config.data, IndexedData)
    tokenizer = config.data.tokenizer
    if tokenizer is not None and options.target == "huggingface" and tokenizer.kind in (*ENCODINGS, "bytes"):
        raise UserError(
            f"data.tokenizer.kind = {tokenizer.kind}: cannot be written for transformers; set data.tokenizer=null"
            " to write only the model"
        )
    if tokenizer is not None and not Path(tokenizer.path).exists():
        raise UserError(
            f"data.tokenizer.path = {tokenizer.path}: does not exist; "
            'set another one with "data.tokenizer={kind: sentencepiece, path: FILE}"'
        )
    with ProgressBar(True) as progress:
        task = progress.add_task("Converting tensors", total=None)
        convert(
            source,
            MEGATRON[options.megatron_format] if options.target == "megatron" else FORMATS[options.target],
            config,
            tokenizer,
            options.output,
            options.tensor,
            lambda total: progress.update(task, total=total, advance=1),
            {"license": options.license, "name": options.push_to_hub},
        )
    model = config.model
    print(
        f"{options.output}: {model.kind}, {model.layers} layers, hidden {model.hidden}, {model.heads} heads, "
        f"vocabulary {model.vocab}: {num_parameters(model):,} parameters"
    )
    if tokenizer is not None:
        with suppress(UserError):
            opened, packing = load_tokenizer(tokenizer), config.data.packing
            print(printable(describe_ids(opened, packing.eod, begin_id(packing.bos, opened))))
    if hub is not None:
        print(f"uploaded to {hub.upload(options.output, options.public)}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
