"""Session of a chat: its models, the conversation, and the KV cache."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from ..cli import terminal
from ..cli.build import Loaded, decided, generation_keywords, load_pair
from ..cli.decide import check_flags, check_governing, check_in_ladder
from ..cli.prompt import QUERY, PromptSettings, check_untemplated, formatted, place_of_query, room_for
from ..cli.prompt_cache import SavedConversation, save_cache
from ..cli.signals import CtrlC, Interrupted
from ..cli.tables import summary_line
from ..decoding.caches import KeptCache
from ..decoding.mode import Mode
from ..decoding.modes import (
    KICKDOWN,
    MODES,
    PAIR,
    ROUTE,
    SHIFTING,
    STATIC,
    TELEMETRY_ONLY,
    check_draft_model,
    make_mode,
)
from ..decoding.pair import pair_cache
from ..decoding.response import GearResponse
from ..decoding.stream import stream_generate
from ..errors import GearbxError, check_choice, choose
from ..gears.gearbox import Gearbox, Observer
from ..gears.ladder import DEFAULT_LADDER, Ladder
from ..loading import DEMO_MODEL
from ..routing.gates import AUTO
from ..routing.pair import NAMES
from ..telemetry.summary import Tally
from ..telemetry.trace import writer_of
from . import ChatSettings, parse_mode


@dataclass(frozen=True)
class NextAnswer:
    """Mode and gears of the next answer.

    reads: bits of the prefill gear. writes: the fewest bits of a token of the answer. Both are 0 if the cache does not
    depend on them. reads_again: whether the next message prefills the answer again.
    """

    mode: Mode
    reads: int = 0
    writes: int = 0
    reads_again: bool = False


class GearedChat:
    """Chat with one model, in gears or observed.

    gears: the names for /gear, lowest first. modes: the names for /mode.

    Args:
        stack: owns the controller for the time of the chat.

    Raises:
        GearbxError: as `generate` for the same settings.
    """

    def __init__(self, settings: ChatSettings, stack: ExitStack):
        loaded = Loaded.of(decided(settings, several_modes=True))
        self._settings = settings
        self._model, self.tokenizer, self.config = loaded.model, loaded.tokenizer, loaded.config
        self._keywords = generation_keywords(settings.sampling, settings.cache, self.tokenizer, model=self._model)
        self._geared = loaded.in_gears()
        gearbox, decision = self._geared.gearbox, self._geared.loaded.decision
        self._controller = stack.enter_context(self._geared.governor())
        self.gears: Sequence[str] = [gear.name for gear in gearbox.ladder]
        self._observes = isinstance(gearbox, Observer)
        instead = f" (without it {decision.codes})" if decision.codes else ""
        self._why = f"no layer of this model changes gear, as requested by mode {TELEMETRY_ONLY}{instead}"
        self.modes: Sequence[str] = [TELEMETRY_ONLY] if self._observes else SHIFTING
        self._mode, self._held, self._first = decision.mode, "", decision.mode.name
        self._check(decision.mode, settings.mode)

    @property
    def missing(self) -> str:
        """Gears of the usual ladder that the mode of the next answer lacks, as a note; "" if it lacks none."""
        decision = self._geared.loaded.decision
        gears, usual = decision.ladder, Ladder.parse(DEFAULT_LADDER)
        bits = [str(gear.bits) for gear in usual if gear.bits not in {each.bits for each in gears}]
        if self._held or self._mode.name not in (ROUTE, KICKDOWN) or not (decision.drafts and bits):
            return ""
        return (
            f" between {' and '.join(str(gear.bits) for gear in gears)} bits only: this chat started in mode "
            f"{self._first}, without gears of {', '.join(bits)} bits; chat --mode {self._mode.name} has {usual}"
        )

    @property
    def mode(self) -> str:
        """Name of the next answer's mode."""
        return STATIC if self._held else self._mode.name

    def new_cache(self) -> list[Any]:
        """Return empty caches."""
        draft, size = self._keywords["draft_model"], self._settings.cache.max_kv_size
        if draft is None:
            return make_prompt_cache(self._model, size)
        return [*make_prompt_cache(self._model), *make_prompt_cache(draft)]

    def save_cache(self, cache: list[Any], conversation: SavedConversation, path: Path) -> None:
        """Write caches to a file, with their conversation. Raises GearbxError if that fails."""
        own = cache[: len(make_prompt_cache(self._model))]  # a draft model's follow
        save_cache(path, own, self._settings.model.model or str(DEMO_MODEL), self._model, conversation)

    def coming(self, message: str) -> NextAnswer:
        """Return mode and gears of the answer to a message, as typed."""
        mode = self._geared.mode(message, self._in_gear(self._held) if self._held else self._mode)
        gearbox = self._geared.gearbox
        if (self._controller is not None and self._controller.caps) or not isinstance(gearbox, Gearbox):
            return NextAnswer(mode)
        reads, writes = mode.gears_of_text(gearbox)
        return NextAnswer(mode, reads.bits, (writes or gearbox.ladder[0]).bits, reads_again=reads != writes)

    def answer(self, mode: Mode, tokens: list[int], max_tokens: int, **keywords: Any) -> Iterator[GearResponse]:
        """Answer in the mode of `coming`; `tokens` are prefilled, `keywords` go to stream_generate."""
        keywords = self._keywords | {"gearbox": self._geared.gearbox, "controller": self._controller} | keywords
        return stream_generate(self._model, self.tokenizer, tokens, max_tokens, mode=mode, **keywords)

    def hold(self, gear: str | None) -> None:
        """Stay in a gear; None: use the mode. Raises GearbxError for an unknown gear."""
        if gear is None:
            self._held = ""
            return
        if self._observes:
            raise GearbxError(f"/gear {gear}: {self._why}; omit it")
        name = self._geared.gearbox.ladder.find(gear).name
        self._check(self._in_gear(name), self._settings.mode)
        self._held = name

    def change(self, mode: str, words: Sequence[str]) -> None:
        """Change the mode and its flags. Raises GearbxError for a mode that these models cannot have."""
        check_mode(mode, MODES)
        flags = self._settings.mode  # the flags of the chat's command line
        given = flags.given() if mode == self._first else flags.given_to_others()
        if words:
            flags = parse_mode(mode, words).mode
            given = flags.given()
            check_flags(mode, given)
        found = make_mode(mode, given)
        self._check(found, flags)
        self._mode, self._held = found, ""

    def _in_gear(self, gear: str) -> Mode:
        return make_mode(STATIC, self._settings.mode.given() | {"gear": gear})

    def _check(self, mode: Mode, flags: Any) -> None:
        """Validate a mode for this model and the settings. Raises GearbxError if it cannot run."""
        if self._observes and mode.name != TELEMETRY_ONLY:
            raise GearbxError(f"mode '{mode.name}': {self._why}; use a new chat without it")
        check_mode(mode.name, self.modes)
        check_governing(self._settings, mode.name)
        check_draft_model(mode.name, self._keywords["draft_model"])
        check_in_ladder(flags, self._geared.gearbox.ladder)
        if mode.name == KICKDOWN or getattr(mode, "thresholds", AUTO) != AUTO:
            mode.resolved(self._geared.gearbox, self.tokenizer, None)


class PairChat:
    """Chat with a pair of models, with the interface and errors of `GearedChat`."""

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

    missing = ""

    def new_cache(self) -> list[Any]:
        return list(pair_cache(self._pair.small, self._pair.large, self._settings.cache.max_kv_size))

    def save_cache(self, cache: list[Any], conversation: SavedConversation, path: Path) -> None:
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
        check_choice("gear of a pair", gear or AUTO, (AUTO, *NAMES))
        self._held = gear or ""

    def change(self, mode: str, words: Sequence[str]) -> None:
        check_mode(mode, self.modes)
        if words:
            raise GearbxError(f"/mode {PAIR}: takes no flags; use /gear small or /gear large for one model")
        self._held = ""


ChatModel = GearedChat | PairChat


def check_mode(mode: str, possible: Collection[str]) -> None:
    """Validate a mode of this chat. Raises GearbxError for an unknown mode, or one that its models cannot have."""
    if mode not in MODES:
        raise GearbxError(f"mode: must be one of this chat's, got {mode}; {choose(mode, possible)}")
    if mode not in possible:
        choices = ", ".join(possible)
        geared = mode == TELEMETRY_ONLY and ROUTE in possible
        why = "is for original weights, got gears" if geared else "is not available in this chat"
        raise GearbxError(f"mode '{mode}': {why}; choose from {choices}, or use a new chat with --mode {mode}")


Message = dict[str, str]  # role and content
RESET = "use /reset for a new conversation"


class Conversation:
    """Messages of user and model in order, after the system prompt if there is one."""

    def __init__(self, settings: PromptSettings, tokenizer: Any):
        self._settings, self._tokenizer = settings, tokenizer
        self.templated = settings.templates(tokenizer)
        if not self.templated:
            check_untemplated(settings, None)
        self.system = settings.system_prompt
        self.turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def instruct(self, system: str | None) -> None:
        """Change the system prompt. Raises GearbxError without a chat template."""
        if not self.templated:
            raise GearbxError("/system: needs a chat template, got a chat without one; omit it")
        self.system = system

    def add(self, message: str, answer: str) -> None:
        # The template adds its own space around an answer. Two spaces would change the tokens that the cache has.
        self.turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer.strip()}]

    def tokens(self, message: str) -> list[int]:
        """Return the tokens of the conversation with a new message. Without a template, every turn is a line.

        Raises GearbxError for messages that the template refuses, and for no tokens.
        """
        tokens = self._tokenizer.encode(self._text(message), add_special_tokens=not self.templated)
        if not tokens:
            raise GearbxError("message: must have tokens, got none; use different words")
        return tokens

    def before_message(self) -> str:
        """Return the text before the next message. Raises GearbxError as `tokens`, or if the template omits it."""
        text = self._text(QUERY)
        return text[: place_of_query(text)]

    def _text(self, message: str) -> str:
        messages = [*self.messages, {"role": "user", "content": message}]
        if self.templated:
            return formatted(self._settings, self._tokenizer, messages)
        return "\n".join(each["content"] for each in messages)


STOPPED = "stopped"


class PromptStopped(Exception):
    """Ctrl-C between two parts of a prompt."""


@dataclass
class ChatAnswer:
    """An answer during generation. `whole`: False if it stopped during a pass."""

    tally: Tally
    tokens: list[int]
    text: str = ""
    last: GearResponse | None = None
    ending: str = ""
    whole: bool = True


class Session:
    """A conversation with one model or a pair; `ctrl_c` stops its answers."""

    def __init__(self, settings: ChatSettings, model: ChatModel, ctrl_c: CtrlC):
        self.settings, self.model, self._ctrl_c = settings, model, ctrl_c
        self.conversation = Conversation(settings.prompt, model.tokenizer)
        self.cache = KeptCache(model.new_cache)
        self._out = terminal.WrappedText(model.gears)
        self._bar = terminal.PromptBar()
        self._noted_cut = False

    def reset(self) -> None:
        """Forget the conversation, except for the system prompt."""
        self.conversation.turns.clear()
        self.cache.forget()

    def save_cache(self, path: Path) -> None:
        """Write the KV cache with its conversation. Raises GearbxError if it cannot be written."""
        talk = self.conversation
        bits = min(self.cache.bits, default=0)
        conversation = SavedConversation(talk.before_message(), talk.templated, self.cache.tokens, bits)
        self.model.save_cache(self.cache.cut_to_tokens(), conversation, path)

    def answer(self, message: str) -> None:
        """Answer a message on stdout, and show its cost in a line on stderr.

        Raises:
            GearbxError: a conversation beyond the model's context, or as `stream_generate`. The message is dropped.
        """
        answer = ChatAnswer(Tally.of(self.model.gears), [])
        with self._out.whole(), self._ctrl_c.answering():
            try:
                self._read_and_write(message, answer)
            except Interrupted:
                answer.ending = STOPPED
            if answer.last is not None:
                self.conversation.add(message, answer.text)
        self._finish(answer)

    def _read_and_write(self, message: str, answer: ChatAnswer) -> None:
        """Prefill the tokens that the cache lacks, and generate the answer."""
        tokens = self.conversation.tokens(message)
        most, size = self.settings.prompt.max_tokens, self.settings.cache.max_kv_size
        max_tokens = room_for(self.model.config, len(tokens), most, size, "the conversation", RESET)
        coming = self.model.coming(message)
        unread = self.cache.unread(tokens, coming.reads)
        keywords = {"prompt_cache": self.cache.entries, "prompt_progress_callback": self._read}
        try:
            with self._bar:
                self._write(self.model.answer(coming.mode, unread, max_tokens, **keywords), answer)
            if coming.reads_again and can_trim_prompt_cache(self.cache.entries):
                self.cache.note(unread[:-1], answer.whole, coming.reads)
            else:
                self.cache.note([*unread, *answer.tokens], answer.whole, min(coming.reads, coming.writes))
        except BaseException:  # such as a second Ctrl-C; the cache's tokens are then unknown
            self.cache.forget()
            raise

    def _write(self, responses: Iterator[GearResponse], answer: ChatAnswer) -> None:
        """Print an answer as it comes, until it ends or Ctrl-C stops it."""
        self._out.begin()
        try:
            with closing(responses):  # type: ignore[type-var]  # it is a generator
                for response in responses:
                    answer.tally.add(response)
                    answer.tokens.append(response.token)
                    answer.text += response.text
                    answer.last = response
                    self._out.write(response.text, writer_of(response))
                    if self._ctrl_c.asked and response.finish_reason is None:
                        answer.ending = STOPPED
                        break
        except PromptStopped:
            answer.ending, answer.whole = STOPPED, False

    def _read(self, read: int, tokens: int) -> None:
        """Show how far a prompt is read, and stop between two parts; mlx-lm calls this after each of them."""
        self._bar.update(read, tokens)
        if self._ctrl_c.asked and read < tokens:
            raise PromptStopped

    def _finish(self, answer: ChatAnswer) -> None:
        last: Any = answer.last
        if last is None:
            terminal.note("stopped before the answer; the message is dropped")
            return
        if not answer.text:
            print(flush=True)
        ending = answer.ending or ("cut" if last.finish_reason == "length" else "")
        most = self.settings.prompt.max_tokens
        if last.finish_reason == "length" and answer.tally.tokens == most and not self._noted_cut:
            self._noted_cut = True
            terminal.note(f"the answer was cut at --max-tokens {most}; set more, or -1 for whole answers")
        terminal.messages.print(summary_line(answer.tally, last, self.model.mode, ending), style="dim", soft_wrap=True)
