"""What a chat talks with: one model in gears, or two that take turns."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..cli.decide import check_flags, check_governing, check_in_ladder
from ..cli.loaded import BegunConversation, Loaded, generation_keywords, load_pair, save_cache
from ..decoding.mode import Mode
from ..decoding.modes import KICKDOWN, MODES, PAIR, ROUTE, STATIC, TELEMETRY_ONLY, check_draft_model, made
from ..decoding.pair import PairedModel
from ..decoding.response import GearResponse
from ..decoding.stream import stream_generate
from ..errors import GearbxError
from ..gears.gearbox import Gearbox, Observer
from ..loading import DEMO_MODEL
from ..routing.gates import AUTO
from ..routing.pair import NAMES
from . import ChatSettings, parse_mode

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
        loaded = Loaded.of(settings, several_modes=True)
        self._settings = settings
        self._model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, loaded.config
        self._keywords = generation_keywords(settings.sampling, settings.cache, self.tokenizer)
        self._geared = loaded.in_gears()
        gearbox, decision = self._geared.gearbox, self._geared.loaded.decision
        self._controller = stack.enter_context(self._geared.governor())
        self.gears: Sequence[str] = [gear.name for gear in gearbox.ladder]
        self._observes = isinstance(gearbox, Observer)
        instead = f" (without it {decision.codes})" if decision.codes else ""
        self._why = f"no layer of this model changes gear; mode {TELEMETRY_ONLY} was asked for{instead}"
        self.modes: Sequence[str] = [TELEMETRY_ONLY] if self._observes else SHIFTING
        self._mode, self._held, self._first = decision.mode, "", decision.mode.name
        self._check(decision.mode, settings.mode)

    @property
    def mode(self) -> str:
        """The mode of the next answer, by name."""
        return STATIC if self._held else self._mode.name

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
        mode = self._geared.mode(message, self._in_gear(self._held) if self._held else self._mode)
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
        self._check(self._in_gear(name), self._settings.mode)
        self._held = name

    def change(self, mode: str, words: Sequence[str]) -> None:
        """Take another mode, with flags. Raises GearbxError for one that these models cannot have."""
        check_mode(mode, MODES)
        flags = self._settings.mode  # those that the chat was started with
        given = flags.given() if mode == self._first else flags.given_to_others()
        if words:
            flags = parse_mode(mode, words).mode
            given = flags.given()
            check_flags(mode, given)
        found = made(mode, given)
        self._check(found, flags)
        self._mode, self._held = found, ""

    def _in_gear(self, gear: str) -> Mode:
        return made(STATIC, self._settings.mode.given() | {"gear": gear})

    def _check(self, mode: Mode, flags: Any) -> None:
        """Raises GearbxError for a mode that this model cannot have with the settings of the chat."""
        if self._observes and mode.name != TELEMETRY_ONLY:
            raise GearbxError(f"mode '{mode.name}' needs gears, and {self._why}")
        check_mode(mode.name, self.modes)
        check_governing(self._settings, mode.name)
        check_draft_model(mode.name, self._keywords["draft_model"])
        check_in_ladder(flags, self._geared.gearbox.ladder)
        if mode.name == KICKDOWN or getattr(mode, "thresholds", AUTO) != AUTO:
            mode.settled(self._geared.gearbox, self.tokenizer, None)


class PairChat:
    """A small and a large model that take turns, to be used as a `GearedChat` is.

    Raises:
        GearbxError: as `generate` for the same settings.
    """

    def __init__(self, settings: ChatSettings, small_model: str):
        self._settings = settings
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
        flags = self._settings.mode.given()
        if self._held:
            flags |= {"gear": self._held, "thresholds": (math.inf if self._held == NAMES[0] else 0.0,)}
        return NextAnswer(self._pair.mode(flags))

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
