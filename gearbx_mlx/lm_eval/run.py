"""The model `gearbx` of lm-eval, which computes token by token.

mlx_lm's class scores a whole span in one pass and generates in batches: no gear of a single token would ever act there.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lm_eval.models  # noqa: F401 - before gearbx is registered: lm-eval loads its own only into an empty registry
import mlx.core as mx
import numpy as np
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from mlx_lm.evaluate import DEFAULT_MAX_TOKENS, MLXLM
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

from ..cli.flags import ModelSettings
from ..cli.gears import GearFlags, LayoutSettings, RoutingSettings
from ..cli.loaded import Loaded
from ..cli.resolved import KICKDOWN, LOSSLESS, ROUTE, STATIC, ModeChoice, resolve_gears
from ..decoding.kickdown import GearedModel, Kickdown
from ..decoding.route import Route
from ..decoding.stream import stream_generate
from ..errors import GearbxError, about, one_line
from ..evaluation.predictions import Policy, RoutePolicy, StaticPolicy, computed, next_logprobs
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..gears.ladder import Ladder
from ..kernels import DEVICES
from ..kernels.device import use_device
from ..routing.gates import Monitor

MODES = STATIC, ROUTE, KICKDOWN, LOSSLESS
ARGUMENTS = (
    *("path", "gears", "mode", "gear", "thresholds", "max_tokens", "use_chat_template", "trust_remote_code"),
    *("kernels", "format", "manage", "group_size"),
)


class Read(list):
    """A KV cache together with the state of the policy that has read so far; both are copied for every continuation."""

    policy: Policy


@register_model("gearbx")
class GearbxLM(MLXLM):
    """lm-eval's face of a gearbox.

    Args:
        path: directory or Hub repository; the demo model if not given.
        gears: bits with colons between, since lm-eval splits its arguments at commas.
        mode: "static", "route", "kickdown" or "lossless", whose scores are those of the top gear.
        gear: name or bits; "static": the only gear, or the top one. "route": the gear to begin in, or the lowest one.
        thresholds: bits, with colons between; a file from calibrate; for route "auto": found on short prompts.
        max_tokens: most tokens to generate; the task's own number if not given.
        kernels, format, manage, group_size: of the Gearbox.
        batch_size, max_batch_size: taken since lm-eval gives them; a token is computed at a time.
        device: "cpu" or "gpu", which the command takes before mlx-lm is imported; others, of torch, mean nothing here.
    """

    def __init__(
        self,
        path: str | None = None,
        gears: str | None = None,
        mode: str = "kickdown",
        gear: str | int | None = None,
        thresholds: str | None = None,
        max_tokens: int | None = None,
        use_chat_template: bool | None = None,
        trust_remote_code: bool = False,
        kernels: str = "auto",
        format: str | None = None,
        manage: str | None = None,
        group_size: int | None = None,
        batch_size: Any = 1,
        max_batch_size: Any = None,
        device: str | None = None,
        **unknown: Any,
    ) -> None:
        LM.__init__(self)
        for name in unknown:
            raise GearbxError(f"--model_args {name}: there is no such argument; choose from {', '.join(ARGUMENTS)}")
        if mode not in MODES:
            raise GearbxError(f"mode '{mode}' does not exist; choose from {', '.join(MODES)}")
        if device in DEVICES:
            use_device(device)
        layout = LayoutSettings(
            gears=None if gears is None else Ladder.parse(with_commas(gears)),
            format=as_text(format),
            manage=as_text(manage),
            q_group_size=whole("group_size", group_size),
        )
        flags = GearFlags(kernels=str(kernels))
        resolved = resolve_gears(ModelSettings(as_text(path), trust_remote_code), layout, flags)
        geared = Loaded.of(replace(resolved, mode=ModeChoice(mode))).in_gears()
        assert isinstance(geared.gearbox, Gearbox)  # ranks alone have models without gears
        self._model, self.tokenizer, self.gearbox = geared.loaded.model, geared.loaded.tokenizer, geared.gearbox
        ladder = self.gearbox.ladder
        self.first = (ladder[0] if mode == ROUTE else ladder.top) if gear is None else ladder.find(gear)
        routing = RoutingSettings(None if thresholds is None else with_commas(thresholds), self.first.name)
        choice = ModeChoice(mode, routing=routing, gear=self.first.name)
        with about(f"--model_args thresholds={thresholds}, bits such as 1.8:3.5 or a file"):
            self.mode = geared.mode("", choice).settled(self.gearbox, self.tokenizer, None)
        self.kickdown = GearedModel(self.gearbox, self.mode.thresholds) if isinstance(self.mode, Kickdown) else None
        self._max_tokens = whole("max_tokens", max_tokens)
        self._batch_size = 1
        self._sampler = None
        self.use_chat_template = self.tokenizer.has_chat_template if use_chat_template is None else use_chat_template

    def policy(self) -> Policy:
        """A new one, at the beginning of a sequence. Kickdown needs none: its model decides."""
        if not isinstance(self.mode, Route):
            return StaticPolicy(self.first)
        gate, monitor = self.mode.gate_for(self.gearbox), Monitor(vocabulary(self._model), self.mode.window)
        policy = RoutePolicy(self.gearbox.ladder, gate, monitor, self.first.index)
        policy.begin()
        return policy

    def _process_prompt(self, prompt: Sequence[int], step_size: int = 2048) -> tuple[mx.array, Read]:
        """Log-probabilities (1, V) after the prompt, whose last token is the first that the policy has a say in: what
        comes before is read in the gear to begin in, as in generation."""
        read = Read(make_prompt_cache(self._model))
        read.policy, before = self.policy(), list(prompt[:-1])
        self.gearbox.shift(self.first)
        for start in range(0, len(before), step_size):
            self._model(mx.array([before[start : start + step_size]]), cache=read)
            mx.eval([part.state for part in read])
        return mx.array(self._next(read, prompt[-1]))[None], read

    def _next(self, read: Read, token: int) -> np.ndarray:
        if self.kickdown is not None:
            return next_logprobs(self.kickdown, [int(token)], read)[0]
        return computed(self.gearbox, read.policy, 0, int(token), read)[0]

    def _score_fn(
        self, inputs: Any, cache: Read | None = None, step_size: int = 2048
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Log-probabilities of each token but the first (n, T - 1), lengths (n,), whether it is the likeliest."""
        rows = np.array(inputs).tolist() if isinstance(inputs, mx.array) else [list(row) for row in inputs]
        longest = max(map(len, rows))
        scores, greedy = np.zeros((len(rows), longest - 1)), np.zeros((len(rows), longest - 1), bool)
        for number, row in enumerate(rows):
            read = cache
            if read is None:
                read = Read(make_prompt_cache(self._model))
                read.policy = self.policy()
            for place, (token, target) in enumerate(itertools.pairwise(row)):
                logprobs = self._next(read, token)
                scores[number, place] = logprobs[int(target)]
                greedy[number, place] = logprobs.argmax() == target
        return mx.array(scores), mx.array([len(row) for row in rows]), mx.array(greedy)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Greedy continuations of (context, options), each up to the first of its `until` strings."""
        texts = []
        for request in tqdm(requests):
            context, options = request.args
            until = [stop for stop in options.get("until", ()) if stop]
            tokens = self.tokenizer.encode(context, add_special_tokens=not self.use_chat_template)
            text = ""
            for response in stream_generate(
                self._model,
                self.tokenizer,
                tokens,
                self._max_tokens or options.get("max_gen_toks", DEFAULT_MAX_TOKENS),
                gearbox=self.gearbox,
                mode=self.mode,
            ):
                text += response.text
                if any(stop in text for stop in until):
                    break
            for stop in until:
                text = text.partition(stop)[0]
            if self.tokenizer.has_thinking:
                text = text.split(self.tokenizer.think_end, 1)[-1]
            texts.append(text)
        return texts


def as_text(value: Any) -> str | None:
    """An argument of --model_args, of which lm-eval makes a number where it looks like one."""
    return None if value is None else str(value)


def whole(name: str, value: Any) -> int | None:
    """An argument of --model_args as a number, if it is given. Raises GearbxError for no whole number above 0."""
    if value is None:
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise GearbxError(f"--model_args {name}={value}: give a whole number, 1 or more")
    return number


def with_commas(value: object) -> str:
    """What a flag would have in the place of an argument: lm-eval splits its arguments at commas."""
    return str(value).replace(":", ",")


def main() -> None:
    """lm-eval's command line, in whose registry the model now is.

    Raises:
        GearbxError: a mistake that lm-eval itself reports, such as a task or a file that is not there.
    """
    try:
        cli_evaluate()
    except GearbxError:
        raise
    except (ValueError, OSError) as error:
        raise GearbxError(f"lm-eval: {one_line(error)}") from error
