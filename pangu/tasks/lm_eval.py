"""Models of this package in EleutherAI's lm-evaluation-harness, under the name `pangu`.

    python -m pangu.tasks.lm_eval --model pangu --model_args pretrained=runs/gpt2 --tasks lambada_openai

This command is `lm_eval` (`pip install lm-eval`) with one more model. Under torchrun, `tensor=2` and `pipeline=2` among
the model's arguments distribute it; the remaining processes share the requests.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pangu.common.errors import UserError
from pangu.common.exit_status import USER_ERROR, exit_status
from pangu.data.boundaries import describe_ids
from pangu.evaluation.generation import Sampling, generate_shared
from pangu.evaluation.inference import LoadedModel
from pangu.interop.loading import load_model
from pangu.tasks.arguments import connected
from pangu.tasks.scoring import ScoredSpan, score
from pangu.topology.launch import Launch, is_first_process

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if __name__ != "__main__" or (error.name or "").partition(".")[0] != "lm_eval":
        raise
    print("lm_eval: needs the package lm-eval: pip install lm-eval (or this package's extra: eval)", file=sys.stderr)
    sys.exit(USER_ERROR)


@register_model("pangu")
class PanguLM(TemplateLM):
    """Trained model for lm_eval; every process gets all requests, and the replicas share them here."""

    def __init__(
        self,
        pretrained: str | LoadedModel,
        tensor: int = 1,
        pipeline: int = 1,
        precision: str | None = None,
        batch_size: int | str = 8,
        device: str = "auto",
    ) -> None:
        """Load the model. Raises UserError if that fails, or if it has no tokenizer or no id that ends a document.

        `pretrained`: path as for `load_model`, or a loaded model; `device`: cpu, or anything else for the accelerator
        if there is one (lm_eval passes cuda:0 by default).
        """
        super().__init__()
        if isinstance(pretrained, str):
            if not str(batch_size).isdecimal():
                raise UserError(f"batch_size={batch_size}: must be a number, e.g. 8")
            device = "cpu" if device == "cpu" else "auto"
            process = ExitStack()
            atexit.register(process.close)
            mesh = process.enter_context(connected(tensor, pipeline, device, Launch.from_environment(), replicas=True))
            pretrained = load_model(Path(pretrained), mesh, precision, rows=int(batch_size))
        if pretrained.tokenizer is None or pretrained.eod is None:
            raise UserError("the model has no tokenizer or end-of-document id; set data.tokenizer and data.packing.eod")
        self._model, self._tokens, self._eod = pretrained, pretrained.tokenizer, pretrained.eod
        self._bos = pretrained.bos
        self._first = self._eod if self._bos is None else self._bos
        print(describe_ids(self._tokens, self._eod, self._bos), file=sys.stderr)
        self._window = pretrained.config.sequence

    @property
    def eot_token_id(self) -> int:
        """Id that ends a document."""
        return self._eod

    @property
    def prefix_token_id(self) -> int:
        """Id before texts without context."""
        return self._first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, after the id that begins a text where the tokenizer adds one."""
        before = [] if self._bos is None or add_special_tokens is False else [self._bos]
        return [*before, *self._tokens.encode(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = score(self._model, [self._span(context, continuation) for _, context, continuation in requests])
        return [(-one.loss, one.greedy) for one in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of full texts, in windows that do not overlap except for the last one.

        As in lm_eval's class for transformers, the beginning of a text is predicted too, from another one's end.
        """
        texts = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(self.tok_encode(text), self._first, self._window, context_len=1)
            texts.append([self._span(*make_disjoint_window(window)) for window in windows])
        scores = iter(score(self._model, [span for spans in texts for span in spans]))
        return [-sum(next(scores).loss for _ in spans) for spans in texts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return texts up to the first of the given strings; greedy unless `do_sample` is set."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        for numbers in groups.values():
            texts |= zip(numbers, self._written([requests[i] for i in numbers]), strict=True)
        return [texts[number] for number in range(len(requests))]

    def _written(self, requests: Sequence[Instance]) -> list[str]:
        """Return the texts of requests with equal sampling parameters."""
        options = requests[0].args[1]
        until = options.get("until") or []
        ends = [until] if isinstance(until, str) else until
        most = min(int(options.get("max_gen_toks", 256)), self._window - 1)
        sampling = Sampling(
            most,
            float(options.get("temperature", 1.0)) if options.get("do_sample", False) else 0.0,
            int(options.get("top_k", 0)),
            float(options.get("top_p", 1.0)),
            stop=tuple(ids[0] for end in ends if len(ids := self._tokens.encode(end)) == 1),
        )
        prompts = [self.tok_encode(request.args[0])[most - self._window :] or [self._eod] for request in requests]
        texts = [self._tokens.decode(ids) for ids in generate_shared(self._model, prompts, sampling)]
        return [min((text.split(end)[0] for end in ends if end), key=len, default=text) for text in texts]

    def _span(self, context: list[int], continuation: list[int]) -> ScoredSpan:
        """Return the end of the context that fits, with the continuation to be scored."""
        ids = [*context, *continuation][-self._window - 1 :]
        return ScoredSpan(tuple(ids), max(1, len(ids) - len(continuation)))


if __name__ == "__main__":
    sys.exit(exit_status(cli_evaluate, is_first_process))
