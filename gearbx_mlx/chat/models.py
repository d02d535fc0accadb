"""What a chat talks with: one model in gears, or two that take turns."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..cli.flags import PAIR, TELEMETRY_ONLY, turns_of
from ..cli.loaded import BegunConversation, Loaded, generation_keywords, load_pair, save_cache
from ..cli.resolved import ROUTE, ModeChoice, check_governing, check_in_ladder, choose_mode, resolve
from ..decoding.mode import Mode, refuse_draft_model
from ..decoding.modes import MODES
from ..decoding.pair import PairedModel
from ..decoding.response import GearResponse
from ..decoding.stream import stream_generate
from ..errors import GearbxError
from ..gears.gearbox import Gearbox, Observer
from ..loading import DEMO_MODEL
from ..routing.pair import NAMES
from . import ChatSettings, parse_mode

STATIC = "static"
IN_GEARS = " is for weights as they are, and these are in gears"
SHIFTING = tuple(mode for mode in MODES if mode not in (PAIR, TELEMETRY_ONLY))


@dataclass(frozen=True)
class NextAnswer:
    """How a message is answered.

    reads: bits of the gear that reads it. writes: the fewest bits in which a token of the answer may be computed. Both
    are 0 where nothing depends on them. reads_again: whether the answer is read again, in the gear of prompts, with the
    next message.
    """

    mode: Mode
    reads: int = 0
    writes: int = 0
    reads_again: bool = False


class GearedChat:
    """One model in gears, or one that is only observed.

    gears: the names that /gear takes, lowest first. modes: those that /mode takes.

    Args:
        stack: what lasts as long as the chat: the controller.

    Raises:
        GearbxError: as `generate` for the same settings.
    """

    def __init__(self, settings: ChatSettings, stack: ExitStack):
        resolved = resolve(settings, mode_changes=True)
        loaded = Loaded.of(resolved)
        self._settings, self._saved = settings, resolved.saved
        self._model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, loaded.config
        self._keywords = generation_keywords(settings.sampling, settings.cache, self.tokenizer)
        self._geared = loaded.in_gears()
        gearbox = self._geared.gearbox
        self._controller = stack.enter_context(self._geared.governor())
        self.gears: Sequence[str] = [gear.name for gear in gearbox.ladder]
        self._observes = isinstance(gearbox, Observer)
        instead = f" (without it {loaded.codes})" if loaded.codes else ""
        self._why = f"no layer of this model changes gear; mode {TELEMETRY_ONLY} was asked for{instead}"
        self.modes: Sequence[str] = [TELEMETRY_ONLY] if self._observes else SHIFTING
        self._start = resolved.mode.of(self._observes)
        self._choice, self._held = self._start, ""
        self._check(self._start)

    @property
    def mode(self) -> str:
        """The mode of the next answer, by name."""
        return STATIC if self._held else self._choice.mode

    def new_cache(self) -> list[Any]:
        """Empty caches."""
        draft, size = self._keywords["draft_model"], self._settings.cache.max_kv_size
        if draft is None:
            return make_prompt_cache(self._model, size)
        return [*make_prompt_cache(self._model), *make_prompt_cache(draft)]

    def save_cache(self, cache: list[Any], begun: BegunConversation, path: Path) -> None:
        """Write caches to a file, with their conversation. Raises GearbxError where they cannot be written."""
        own = cache[: len(make_prompt_cache(self._model))]  # a draft model's follow
        save_cache(path, own, self._settings.model.model or str(DEMO_MODEL), self._model, begun)

    def coming(self, message: str) -> NextAnswer:
        """How a message is answered, as typed."""
        mode = self._geared.mode(message, self._held_choice(self._held) if self._held else self._choice)
        gearbox = self._geared.gearbox
        if self._controller is not None or not isinstance(gearbox, Gearbox):
            return NextAnswer(mode)
        reads, writes = mode.gears_of_text(gearbox)
        return NextAnswer(mode, reads.bits, (writes or gearbox.ladder[0]).bits, reads_again=reads != writes)

    def answer(self, mode: Mode, tokens: list[int], max_tokens: int, **keywords: Any) -> Iterator[GearResponse]:
        """Answer in the mode of `coming`; `tokens` are to be read, `keywords` go to stream_generate."""
        keywords = self._keywords | {"gearbox": self._geared.gearbox, "controller": self._controller} | keywords
        return stream_generate(self._model, self.tokenizer, tokens, max_tokens, mode=mode, **keywords)

    def hold(self, gear: str | None) -> None:
        """Stay in a gear; None: back to the mode. Raises GearbxError for a gear that does not exist."""
        if gear is None:
            self._held = ""
            return
        if self._observes:
            raise GearbxError(f"/gear {gear}: {self._why}")
        name = self._geared.gearbox.ladder.find(gear).name
        self._check(self._held_choice(name))
        self._held = name

    def change(self, mode: str, words: Sequence[str]) -> None:
        """Take another mode, with flags. Raises GearbxError for one that these models cannot have."""
        choice = replace(self._start, mode=mode, asked=True)
        if words:  # else the flags that the chat was started with
            check_mode(mode, MODES)
            choice, _ = choose_mode(replace(self._settings, **vars(parse_mode(mode, words))), self._saved)
        self._check(choice)
        self._choice, self._held = choice, ""

    def _held_choice(self, gear: str) -> ModeChoice:
        return replace(self._start, mode=STATIC, asked=True, own=replace(self._start.own, gear=gear))

    def _check(self, choice: ModeChoice) -> None:
        """Raises GearbxError for a mode that this model cannot have with the settings of the chat."""
        ladder = self._geared.gearbox.ladder
        if self._observes and choice.mode != TELEMETRY_ONLY:
            raise GearbxError(f"mode '{choice.mode}' needs gears, and {self._why}")
        check_mode(choice.mode, self.modes)
        check_governing(self._settings.controller, choice.mode, None)
        if choice.mode not in (ROUTE, STATIC, TELEMETRY_ONLY):
            refuse_draft_model(choice.mode, self._keywords)
        check_in_ladder(choice, ladder)
        self._geared.mode("", choice)


class PairChat:
    """A small and a large model that take turns, to be used as a `GearedChat` is.

    Raises:
        GearbxError: as `generate` for the same settings.
    """

    def __init__(self, settings: ChatSettings, small_model: str):
        self._settings = settings
        self._turns = turns_of(settings.mode.thresholds, settings.mode)
        self._pair = load_pair(settings.model, small_model)
        self.tokenizer, self.config = self._pair.tokenizer, self._pair.config
        self._keywords = generation_keywords(settings.sampling, settings.cache, self.tokenizer)
        self.gears: Sequence[str] = NAMES
        self.modes: Sequence[str] = (PAIR,)
        self._held = ""

    @property
    def mode(self) -> str:
        return PAIR

    def new_cache(self) -> list[Any]:
        return PairedModel(self._pair.small, self._pair.large).make_cache(self._settings.cache.max_kv_size)

    def save_cache(self, cache: list[Any], begun: BegunConversation, path: Path) -> None:
        raise GearbxError(f"{path}: a pair has two KV caches, and the file is for one; save the text as .md or .jsonl")

    def coming(self, message: str) -> NextAnswer:
        if self._held:
            return NextAnswer(self._pair.mode(self._turns, self._held, math.inf if self._held == NAMES[0] else 0.0))
        return NextAnswer(self._pair.mode(self._turns, self._settings.mode.initial_gear))

    def answer(self, mode: Mode, tokens: list[int], max_tokens: int, **keywords: Any) -> Iterator[GearResponse]:
        keywords = self._keywords | keywords
        return stream_generate(self._pair.large, self.tokenizer, tokens, max_tokens, mode=mode, **keywords)

    def hold(self, gear: str | None) -> None:
        if gear not in (None, *NAMES):
            raise GearbxError(f"no model '{gear}' in a pair; choose from auto, {', '.join(NAMES)}")
        self._held = gear or ""

    def change(self, mode: str, words: Sequence[str]) -> None:
        check_mode(mode, self.modes)
        if words:
            raise GearbxError(f"/mode {PAIR} takes no flags; /gear small or /gear large stays with one model")
        self._held = ""


ChatModel = GearedChat | PairChat


def check_mode(mode: str, possible: Collection[str]) -> None:
    """Raises GearbxError for a mode that does not exist, or that the models of this chat cannot have."""
    if mode not in MODES:
        raise GearbxError(f"mode '{mode}' does not exist; choose from {', '.join(possible)}")
    if mode not in possible:
        choices = ", ".join(possible)
        why = IN_GEARS if mode == TELEMETRY_ONLY and ROUTE in possible else ""
        raise GearbxError(f"mode '{mode}'{why}: this chat has {choices}; start another one with --mode {mode}")
