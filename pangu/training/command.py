"""Command line of a run: composition by Hydra, output by the first process, one message for user errors."""

from __future__ import annotations

import glob
import logging
import os
import re
import shlex
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pangu.common.errors import MOST_DIGITS, ConfigError, Problem, UserError, shown
from pangu.common.exit_status import INTERRUPTED, exit_status
from pangu.common.files import read_json_object
from pangu.config.build import RENAMED, build, keys_of, with_new_names
from pangu.config.schema import RunConfig
from pangu.config.suggest import close_names
from pangu.topology.launch import Launch, is_first_process
from pangu.training.interrupts import ENDED, ending_at_once

log = logging.getLogger("pangu")

_OF_LAUNCHER = ("nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "rdzv-endpoint", "max-restarts")
"""Options of torchrun, which belong before pretrain.py."""


def run_command(configs: Path, train: Callable[[Mapping[str, Any], Set[str]], None]) -> None:
    """Compose the configuration from the command line and train; end the process with its exit status.

    Args:
        configs: absolute path of the folder with base.yaml.
        train: carries out a composed configuration, given the keys that the command line sets.
    """
    words = sys.argv[1:]
    place = next((n for n, pair in enumerate(pairwise(words)) if pair in (("--cfg", "job"), ("-c", "job"))), None)
    overrides = words if place is None else words[:place] + words[place + 2 :]

    def task(composed: DictConfig) -> float | None:
        values: dict[str, Any] = {}

        def carry_out() -> None:
            check_sweeper(str(HydraConfig.get().runtime.choices.get("hydra/sweeper", "basic")))
            values.update(_with_new_names(composed, overrides))
            train(values, given_keys(overrides))

        try:
            _end(carry_out)
        except Exception:  # else it would seem to be one of the composition
            traceback.print_exc()
            sys.exit(1)
        return final_loss(values)

    _end(lambda: refuse_long_integers(overrides))
    if any(word.startswith("-") for word in overrides):
        # all other options are Hydra's: --info, --multirun
        _end(lambda: require_options(overrides, configs))
        sys.argv[1:] = [_name_files(word, configs) for word in words]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints errors itself, most of them as tracebacks

        def sweep() -> None:
            with _plain_messages(sys.argv[1:], configs):
                hydra.main(version_base="1.3", config_path=str(configs), config_name="base")(task)()

        _end(sweep)
    else:

        def carry_out() -> None:
            with ending_at_once():
                values = compose(configs, overrides)
            if place is None:
                train(values, given_keys(overrides))
            else:  # `--cfg job`
                build(RunConfig, values)
                print(OmegaConf.to_yaml(values), end="")

        _end(carry_out)


def check_sweeper(sweeper: str) -> None:
    """Raise UserError if each of several processes would choose trials of its own."""
    if sweeper != "basic" and Launch.from_environment().world > 1:
        fix = "start it on one process, or sweep a list of values, which all processes run in the same order"
        raise UserError(f"hydra/sweeper={sweeper}: each process would choose other values; {fix}")


def final_loss(values: Mapping[str, Any]) -> float | None:
    """Return the objective of a sweep: the last validation loss of a run, or its training loss where that is off.

    None for a run that is not complete.
    """
    train = values["train"]
    try:
        summary = read_json_object(Path(train["output"]) / "summary.json")
    except UserError:
        return None
    loss = summary.get("validation_loss" if values["validation"]["every"] else "loss")
    return loss if summary.get("steps") == train["steps"] and isinstance(loss, float) else None


def require_options(words: Sequence[str], configs: Path) -> None:
    """Raise UserError if the command line has options unknown to Hydra, with the keys that they may stand for."""
    known = get_args_parser()._option_string_actions
    lines = []
    for word, following in pairwise([*words, "-"]):
        option, _, value = word.partition("=")
        if option.startswith("-") and option not in known:
            value = value or ("VALUE" if following.startswith("-") or "=" in following else following)
            near = _counterparts(option.strip("-"), value, configs)
            advice = f"did you mean {' or '.join(near)}?" if near else "unknown"
            if option.strip("-").replace("_", "-") in _OF_LAUNCHER:
                advice = f"use the launcher: python scripts/launch.py {shown(option)}={shown(value)} pretrain.py ..."
            lines.append(f"  {shown(option)}: {advice}")
    if lines:
        rule = "set values as KEY=VALUE (--help); tools/translate_config.py translates whole commands"
        raise UserError("\n".join([f"unknown option: {rule}", *lines]))


def _counterparts(name: str, value: str, configs: Path) -> list[str]:
    """Return words of this command line that an option of another program may stand for."""
    if name in ("config", "preset", "recipe"):
        return [f"+config={value}"]
    options = [f"{path.parent.name}={name}" for path in configs.glob(f"*/{glob.escape(name)}.yaml")]
    return options or [f"{key}={value}" for key in close_names(name, keys_of(RunConfig))]


def refuse_long_integers(words: Sequence[str]) -> None:
    """Raise UserError for an integer with more digits than Python parses, which no key accepts."""
    for word in words:
        if re.search(rf"\d{{{MOST_DIGITS + 1}}}", word):
            raise UserError(f"{shown(word)}: has an integer of more than {MOST_DIGITS:,} digits, which no key accepts")


def given_keys(words: Iterable[str]) -> set[str]:
    """Return the keys that words of a command line set, also as groups: `memory={recompute: full}`."""
    return {RENAMED.get(key, key) for key in _keys_in_order(words)}


def _keys_in_order(words: Iterable[str]) -> Iterator[str]:
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    # the name of a file may need quotes
    settings = [word if _is_override(word) else f"{word.partition('=')[0]}=" for word in settings]
    for override in OverridesParser.create().parse_overrides(settings):
        value, key = override.value(), override.key_or_group
        yield from (f"{key}.{name}" for name in value) if isinstance(value, Mapping) else (key,)


def _with_new_names(composed: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a composed configuration with new names for renamed keys; warn of old names on the first rank."""
    old_names = set[str]()
    values = with_new_names(_plain(composed), list(_keys_in_order(overrides)), old_names.add)
    for old in sorted(old_names) if is_first_process() else ():
        log.warning("%s is deprecated; set %s instead", old, RENAMED[old])
    return values


def _end(action: Callable[[], None]) -> None:
    status = exit_status(action, is_first_process)
    if status == INTERRUPTED:
        if sys.stdout is not None:
            sys.stdout.flush()
        if is_first_process():
            print(ENDED, file=sys.stderr, flush=True)
        os._exit(status)  # Python's own end would wait for threads, and abort if one is in the store
    if status:
        sys.exit(status)


def compose(configs: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration that pretrain.py would run from, given these overrides.

    Unknown keys are kept, so that they are reported together with all other problems. Raises UserError for unreadable
    overrides, unknown options and unresolvable references.
    """
    groups = {
        path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in configs.iterdir() if path.is_dir()
    }
    overrides = [_name_files(word, configs) for word in overrides]
    with _plain_messages(overrides, configs), hydra.initialize_config_dir(str(configs), version_base="1.3"):
        composed = hydra.compose("base", overrides=[_lenient(word, groups) for word in overrides])
        return _with_new_names(composed, overrides)


@contextmanager
def _plain_messages(overrides: Sequence[str], configs: Path) -> Iterator[None]:
    """Raise UserError for overrides, options and files that Hydra cannot compose."""
    try:
        yield
    except OverrideParseException as error:
        rule = "cannot be read: use KEY=VALUE, GROUP=OPTION or +config=RECIPE, with quotes around special characters"
        word = str(error.override)
        joined = _joined(word, overrides, [file.stem for file in configs.glob("config/*.yaml")])
        meant = _halfwidth(word) or [one for one in (joined or _quoted(word),) if one]
        fix = f"; write {shlex.join(meant)}" if meant else ""
        raise UserError(f"{shown(word)}: {rule}{fix}") from error
    except MissingConfigException as error:
        group, option = re.findall("(hydra/[^/]*|[^/]*)/?(.*)", error.missing_cfg_file or "")[0]
        rule = "no such file" if option.endswith(".yaml") else "unknown option"
        file = "" if "/" in group else f", or a file: {group}=PATH.yaml"
        fix = f"use one of {', '.join(error.options)}{file}" if error.options else ""
        raise ConfigError([Problem(group, option, rule, fix)]) from error
    except (HydraException, OmegaConfBaseException) as error:
        message = str(error).partition("\n\n")[0].replace("++", "")
        reason = f" ({str(error.__cause__).splitlines()[0]})" if message.startswith("Error merging") else ""
        raise UserError(f"{message}{reason}") from error
    except (YAMLError, ValueError, RecursionError, OSError) as error:
        reason = shown(" ".join(str(error).split()))
        raise UserError(f"the configuration cannot be read from {configs} and the command line: {reason}") from error


def _name_files(word: str, configs: Path) -> str:
    """Return an override in which files that are options of a group (`cluster=mine.yaml`) have Hydra's names.

    Hydra reads an option from the folder of its group, from where a relative name leads to any file.
    """
    setting = re.fullmatch(r"([+~]*(\w+)(?:@[^=]*)?=)(.*)", word, re.DOTALL)
    if setting is None or (folder := configs / setting[2]) not in configs.iterdir():
        return word

    def named(text: str) -> str:
        file = Path(text.strip("\"' "))
        with suppress(OSError):  # of a name that is too long, or a folder that cannot be read
            if file.suffix == ".yaml" and file.is_file():
                # not the target of a link, whose name may end otherwise
                path = os.path.relpath(file.parent.resolve() / file.name, folder.resolve())
                return _text(re.sub(r"(\\*)\$\{", r"\1\1\\${", path))  # else Hydra looks for a key of that name
        return text

    value = named(setting[3])
    if value == setting[3] and value[:1] != "{":  # several ones in a sweep or a list
        value = re.sub(r"\"[^\"]*\"|'[^']*'|[^][(),]+", lambda part: named(part[0]), value)
    return setting[1] + value


def _lenient(word: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return an override in a form that Hydra accepts for any key, as the schema decides which keys exist.

    Raises OverrideParseException for an invalid override, ConfigError for a group without the name of an option.
    """
    (override,) = OverridesParser.create().parse_overrides([word])
    key = override.key_or_group
    if not key:
        raise OverrideParseException(word, "names no key")
    if key == "config" and not word.startswith(("+", "~")):
        word = f"+{word}"
    if override.is_sweep_override():
        name, _, value = word.partition("=")
        ways = [shlex.quote(f"{name}={one}") for one in (f"[{value}]", _text(value))]
        fix = "use one, or pretrain.py --multirun for a run with each"
        fix = fix if key in groups else f"use {ways[0]} for a list, {ways[1]} for one string"
        raise UserError(f"{shown(word)}: several values; {fix}")
    value = override.value()
    if not isinstance(value, dict) and (key in groups or "/" in key or override.package):
        options = value if isinstance(value, list) else [value]
        if not override.is_delete() and not all(isinstance(option, str) for option in options):
            fix = f"use one of {', '.join(groups.get(key, ()))}"
            raise ConfigError([Problem(key, value, "must be the name of an option", fix)])
        return word
    return word if override.is_delete() or key.startswith("hydra.") else f"++{word.lstrip('+')}"


def _halfwidth(word: str) -> list[str]:
    """Return the words that an input method has written in full-width characters (`＝`, `，`); empty: it has not."""
    words = unicodedata.normalize("NFKC", word.replace("\N{FULLWIDTH COMMA}", " ")).split()
    return words if words != [word] and all("=" in one and _is_override(one) for one in words) else []


def _quoted(word: str) -> str | None:
    """Return an override that Hydra cannot read with the quotes that it needs; None if quotes are not enough."""
    key, equals, value = word.partition("=")
    quoted = f"{key}={_quoted_value(value)}"
    return quoted if equals and value and _is_override(quoted) else None


def _joined(word: str, words: Sequence[str], recipes: Sequence[str]) -> str | None:
    """Return the meaning of a recipe's name, or of a word that the shell has split at spaces; None if it is neither."""
    if word in recipes:
        return f"+config={word}"
    following = words[words.index(word) + 1 :] if word in words else []
    if word.partition("=")[2].startswith(("[", "{")):
        texts = (" ".join([word, *following[:count]]) for count in range(1, len(following) + 1))
        return next(filter(_is_override, texts), None)
    value = next((one.removeprefix("=") for one in following if one != "="), "")
    meant = f"{word}={value}"
    return meant if "=" not in word and value and _is_override(meant) else None


def _quoted_value(value: str) -> str:
    value = value.strip()
    if _is_override(f"key={value}"):
        return value
    if value[:1] + value[-1:] == "[]":
        return f"[{','.join(map(_quoted_value, value[1:-1].split(',')))}]"
    if value[:1] + value[-1:] == "{}":
        pairs = (pair.partition(":") for pair in value[1:-1].split(","))
        return f"{{{','.join(f'{key}:{_quoted_value(one)}' for key, _, one in pairs)}}}"
    return _text(value)


def _text(value: str) -> str:
    return '"' + value.replace('"', '\\"') + '"'


def _is_override(word: str) -> bool:
    try:
        return bool(OverridesParser.create().parse_overrides([word]))
    except HydraException:
        return False


def _plain(composed: DictConfig) -> dict[str, Any]:
    try:
        values = OmegaConf.to_container(composed, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(list(_unresolved(composed, ""))) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _unresolved(group: Any, path: str) -> Iterator[Problem]:
    """Yield the references of a DictConfig or ListConfig that lead nowhere, or to a group of keys."""
    raw: Any = OmegaConf.to_container(group, resolve=False)
    for key in range(len(raw)) if isinstance(raw, list) else raw:
        name = f"{path}.{key}" if path else str(key)
        try:
            value = group[key]
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0].rpartition("raised while resolving interpolation: ")[2]
            yield Problem(name, raw[key], f"cannot be resolved: {reason}", "quote it as \\${...} to keep it literally")
            continue
        if OmegaConf.is_interpolation(group, key) and isinstance(value, Container):
            yield Problem(name, raw[key], "refers to a group of keys, not to a value")
        elif isinstance(value, Container):
            yield from _unresolved(value, name)
