"""Serve a model in gears, or two models that take turns."""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from mlx_lm.models.cache import LRUPromptCache

from ..cli.flags import PAIR, TELEMETRY_ONLY, Turns, turns_of
from ..cli.loaded import Geared, Loaded, LoadedPair, load_draft_model, load_pair
from ..cli.resolved import Resolved, resolve
from ..decoding.lossless import Lossless
from ..decoding.mode import SAME, Mode
from ..decoding.modes import mode_class
from ..errors import GearbxError, about
from ..files.model_directory import context_length
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox
from ..loading import DEMO_MODEL, find
from ..routing.pair import NAMES, check_threshold
from ..serving.app import server_application
from ..serving.listening import Server
from ..serving.provider import GearedProvider, Served
from ..serving.requests import Options
from ..serving.scheduler import Scheduler, join_to_the_end
from ..serving.web import Guard
from . import ServerSettings

SHIFTING = ("route", "kickdown", "lossless", "static")
GOVERNED = ("route", "kickdown")


def modes_of(geared: Geared, has_draft_model: bool, governed: bool) -> tuple[str, ...]:
    """The modes that requests may ask for."""
    if not isinstance(geared.gearbox, Gearbox):
        return (TELEMETRY_ONLY,)
    if governed:
        return GOVERNED
    if has_draft_model:
        return ("route", "static")
    return SHIFTING


def mode_for(geared: Geared, modes: tuple[str, ...], default_mode: str, options: Options, prompt: str) -> Mode:
    """The mode of a request: the server's own, changed as its options say.

    Raises:
        GearbxError: a mode or a gear that the server was not started for, options of another mode.
    """
    choice = geared.loaded.resolved.mode
    wanted = options.mode or mode_of_options(options, mode_class(default_mode))
    if wanted is not None:
        if wanted not in modes:
            raise GearbxError(f"mode '{wanted}' is not served here; choose from {', '.join(modes)}")
        choice = replace(choice, mode=wanted, asked=True)
    kind = mode_class(wanted or default_mode)
    if options.gear is not None:
        refuse_unless(kind.name == "static", "gear", kind.name)
        with about("gear"):
            choice = replace(choice, own=replace(choice.own, gear=geared.gearbox.ladder.find(options.gear).name))
    if options.thresholds is not None:
        refuse_unless(hasattr(kind, "thresholds"), "thresholds", kind.name)
        bits = ",".join(repr(float(each)) for each in options.thresholds)
        choice = replace(choice, own=replace(choice.own, thresholds=bits))
    mode = geared.mode(prompt, choice).settled(geared.gearbox, geared.loaded.tokenizer, None)
    if options.draft is not None:
        refuse_unless(isinstance(mode, Lossless), "draft", kind.name)
        with about("gearbx.draft"):
            mode = replace(mode, draft=geared.gearbox.ladder.find(options.draft).name)  # type: ignore[call-arg]
    return mode


def mode_of_options(options: Options, default: type[Mode]) -> str | None:
    """The mode that a request's other options belong to, if it names none; None: the server's own."""
    if options.gear is not None:
        return "static"
    if options.thresholds is not None and not hasattr(default, "thresholds"):
        return "route"
    return "lossless" if options.draft is not None and default is not Lossless else None


def refuse_unless(fits: bool, field: str, mode: str) -> None:
    if not fits:
        raise GearbxError(f"{field} does not belong to mode '{mode}'; leave it out, or give another mode")


def serve_pair(pair: LoadedPair, turns: Turns, initial_gear: str) -> Served:
    """Serve two models that take turns."""

    def mode(options: Options, prompt: str) -> Mode:
        if options.mode not in (None, PAIR):
            raise GearbxError(f"mode '{options.mode}' is not served here; two models take turns: {PAIR}")
        for field in ("gear", "draft"):
            refuse_unless(getattr(options, field) is None, field, PAIR)
        if options.thresholds is None:
            return pair.mode(turns, initial_gear)
        if len(options.thresholds) != 1:
            raise GearbxError("gearbx.thresholds: two models have one threshold between them")
        check_threshold(options.thresholds[0])
        return pair.mode(turns, initial_gear, options.thresholds[0])

    return Served(
        model=pair.large,
        tokenizer=pair.tokenizer,
        config=pair.config,
        gearbox=None,
        mode=mode,
        modes=(PAIR,),
        default_mode=PAIR,
        gears=NAMES,
        context=context_length(pair.config),
        vocabulary=pair.vocab_size,
        small_model=pair.small,
    )


MOST_BYTES, FIVE_MINUTES = 1 << 63, 300.0


@contextmanager
def serving(settings: ServerSettings, guard: Guard) -> Iterator[Server]:
    """A server that listens and has its model; it answers while the context lasts.

    Raises:
        GearbxError: an address that is taken, a model that cannot be loaded.
    """
    with Server(settings.listen.host, settings.listen.port, guard.patience) as server:
        prepare = partial(prepared, settings)
        listen = settings.listen
        keep = listen.keep_alive if listen.keep_alive is not None else FIVE_MINUTES if listen.models else math.inf
        own = cli_args(settings), settings.model.model
        provider = GearedProvider(*own, prepare, listen.allow_models, listen.models, keep)
        concurrency = settings.concurrency
        kept = LRUPromptCache(concurrency.prompt_cache_size, concurrency.prompt_cache_bytes or MOST_BYTES)
        scheduler = Scheduler(provider, kept)
        server.serves = said_of(provider)
        try:
            server.start(server_application(guard, scheduler))
            yield server
        finally:
            scheduler.stop()
            server.stop()
            join_to_the_end(scheduler.thread)
            provider.forget()


def said_of(provider: GearedProvider) -> str:
    """What is served, in a few words. Here, since a model that is replaced must have no name that stays."""
    served = provider.served
    if served is None:
        return f"serving {', '.join(provider.catalogue)}, each when it is asked for"
    return f"serving {provider.name}, mode {served.default_mode}, gears {', '.join(served.gears)}"


def prepared(settings: ServerSettings, path: str | None, adapter: str | None) -> Callable[[], Served]:
    """What loads a model with its gears, or a pair. Raises GearbxError where there is none, or flags do not fit it."""
    model, template = replace(settings.model, model=path, adapter_path=adapter), settings.answers.chat_template
    find(path or DEMO_MODEL)
    if settings.mode.small_model is not None:
        turns = turns_of(settings.mode.thresholds, settings.mode)
        return lambda: serve_pair(
            load_pair(model, settings.mode.small_model or "", template), turns, settings.mode.initial_gear
        )
    resolved = resolve(replace(settings, model=model), mode_changes=True)
    return lambda: load_geared(resolved, settings.cache.draft_model, template)


def load_geared(resolved: Resolved, draft_model_path: str | None, template: str) -> Served:
    """A model with its gears, as it is served. Raises GearbxError for one that cannot be loaded."""
    with ExitStack() as stack:
        loaded = Loaded.of(resolved, template)
        draft_model = load_draft_model(draft_model_path, loaded.tokenizer)
        geared = loaded.in_gears()
        check_prompt_gear(geared)
        controller = stack.enter_context(geared.governor())
        modes = modes_of(geared, draft_model is not None, controller is not None)
        own = geared.mode("").settled(geared.gearbox, loaded.tokenizer, None)

        def mode(options: Options, prompt: str) -> Mode:
            if options == Options() and not hasattr(own, "initial_gear"):  # which a prompt chooses
                return own
            return mode_for(geared, modes, own.name, options, prompt)

        return Served(
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            config=loaded.config,
            gearbox=geared.gearbox,
            mode=mode,
            modes=modes,
            default_mode=own.name,
            gears=tuple(gear.name for gear in geared.gearbox.ladder),
            context=context_length(loaded.config),
            vocabulary=vocabulary(loaded.model),
            draft_model=draft_model,
            controller=controller,
            close=stack.pop_all().close,  # of what watches the machine
        )


def check_prompt_gear(geared: Geared) -> None:
    """Raises GearbxError for a prompt gear that the loaded model does not have, before a request asks for it."""
    resolved, gearbox = geared.loaded.resolved, geared.gearbox
    wanted = resolved.mode.own.prompt_gear
    if wanted in (None, SAME):
        return
    if not isinstance(gearbox, Gearbox):
        raise GearbxError(f"--prompt-gear {wanted}: this model has one precision; leave the flag out")
    replace(resolved, ladder=gearbox.ladder).check_mode()


def cli_args(settings: ServerSettings) -> argparse.Namespace:
    """The flags as mlx-lm's server has them, for the parts of it that are at work here."""
    groups = settings.listen, settings.answers, settings.concurrency, settings.cache
    values = {name: value for group in groups for name, value in vars(group).items()}
    values |= {"model": settings.model.model, "adapter_path": settings.model.adapter_path, "pipeline": False}
    values |= {"trust_remote_code": settings.model.trust_remote_code}
    values["chat_template_args"] = settings.answers.template_arguments()
    return argparse.Namespace(**values)
