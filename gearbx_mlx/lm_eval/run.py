"""The model `gearbx` of lm-eval: mlx_lm's class, in gears set by flags of `gearbx_mlx generate`.

mlx_lm's class scores a span in one forward pass and generates in batches, so gears could not change per token. Here a
span is generated token by token, with a sampler that chooses the span's own tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lm_eval.models  # noqa: F401 - before gearbx is registered: lm-eval loads its own only into an empty registry
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from mlx_lm.evaluate import DEFAULT_MAX_TOKENS, MLXLM
from tqdm import tqdm

from ..cli.build import Loaded, decided
from ..cli.parser import command_settings
from ..decoding.lossless import Lossless
from ..decoding.route import Static
from ..decoding.stream import stream_generate
from ..errors import GearbxError, one_line
from ..evaluation.predictions import written_text
from ..generate import GenerateSettings, setup_arg_parser
from ..settings import flag_of, given_names

MEANINGLESS = ("input", "sampling", "cache", "controller", "output")  # groups of flags without effect here


@register_model("gearbx")
class GearbxLM(MLXLM):
    """A model in gears with lm-eval's interface.

    Args:
        batch_size, max_batch_size, device: lm-eval's, without effect. One token is computed at a time, and the command
            has set the device before mlx-lm was imported.
        flags: of `gearbx_mlx generate`, for `settings_of`.
    """

    def __init__(self, batch_size: Any = 1, max_batch_size: Any = None, device: Any = None, **flags: Any) -> None:
        LM.__init__(self)
        settings = settings_of(flags)
        geared = Loaded.of(decided(settings)).in_gears()
        self._model, self.tokenizer = geared.loaded.model, geared.loaded.tokenizer
        mode = geared.mode("").resolved(geared.gearbox, self.tokenizer, None)
        mode = Static() if isinstance(mode, Lossless) else mode  # with the same outputs and scores
        self._max_tokens = settings.prompt.max_tokens if "max_tokens" in flags else None
        self.use_chat_template = self.tokenizer.has_chat_template and not settings.prompt.ignore_chat_template
        self.how: dict[str, Any] = {"mode": mode, "gearbox": geared.gearbox}

    def scored(self, before: Sequence[int], span: Sequence[int]) -> Iterator[tuple[float, bool]]:
        """Yield the log-probability (nats) of each token of a span, and whether it is the most likely one."""
        for token, response in zip(span, written_text(self._model, self.tokenizer, before, span, **self.how)):
            logprobs = response.logprobs.reshape(-1)
            yield logprobs[token].item(), logprobs.argmax().item() == token

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Score each (context, continuation): log-probability, and whether every token is the most likely one."""
        found = []
        for context, continuation in (request.args for request in tqdm(requests)):
            before, whole = self._tokenize([context, context + continuation])
            start = before or (self.tokenizer.eos_token_id,)
            scores = list(self.scored(start, whole[len(before) :]))
            found.append((sum(score for score, _ in scores), all(likeliest for _, likeliest in scores)))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Score each (text,) after its first token."""
        texts = self._tokenize([request.args[0] for request in requests])
        return [sum(score for score, _ in self.scored(tokens[:1], tokens[1:])) for tokens in tqdm(texts)]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Continue each (context, options), up to the first of its `until` strings."""
        return [self.continued(*request.args) for request in tqdm(requests)]

    def continued(self, context: str, options: Mapping[str, Any]) -> str:
        until, text = [stop for stop in options.get("until", ()) if stop], ""
        most = self._max_tokens or options.get("max_gen_toks", DEFAULT_MAX_TOKENS)
        for response in stream_generate(self._model, self.tokenizer, self._tokenize([context])[0], most, **self.how):
            text += response.text
            if any(stop in text for stop in until):
                break
        for stop in until:
            text = text.partition(stop)[0]
        return text.split(self.tokenizer.think_end, 1)[-1] if self.tokenizer.has_thinking else text


def settings_of(flags: Mapping[str, Any]) -> GenerateSettings:
    """Return the settings in --model_args: flags of generate, with colons for commas, since lm-eval splits at commas.

    Raises:
        GearbxError: a flag without effect here.
        SystemExit: an unknown flag.
    """
    parser: Any = setup_arg_parser()
    words = [flag_of(name) + ("" if value is True else f"={value}".replace(":", ",")) for name, value in flags.items()]
    settings: GenerateSettings = command_settings(parser.kind, vars(parser.parse_args(words)))
    for name, group in vars(settings).items():
        for flag in given_names(group, type(group)()) if name in MEANINGLESS else ():
            raise GearbxError(f"--model_args {flag}: no meaning for lm-eval; omit it")
    if settings.mode.small_model is not None:
        raise GearbxError("--model_args small_model: lm-eval has one model; omit it")
    return settings


def main() -> None:
    """Run lm-eval's command line, with this model in its registry.

    Raises:
        GearbxError: a mistake reported by lm-eval, such as a missing task or file.
    """
    try:
        cli_evaluate()
    except GearbxError:
        raise
    except (ValueError, OSError) as error:
        raise GearbxError(f"lm-eval: {one_line(error)}") from error
