"""Server of a model in gears, or of a pair of models."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

from mlx_lm.models.cache import LRUPromptCache

from ..cli.build import Geared, Loaded, LoadedPair, load_draft_model, load_pair
from ..cli.decide import Decision, check_in_ladder, decide
from ..cli.describe import describe, machine_for
from ..decoding.lossless import Lossless
from ..decoding.mode import SAME, Mode
from ..decoding.modes import KICKDOWN, LOSSLESS, PAIR, ROUTE, SHIFTING, TELEMETRY_ONLY, make_mode
from ..errors import GearbxError, choose, error_context
from ..files.model_directory import context_length
from ..gears.discovery import vocabulary
from ..gears.gearbox import Gearbox, Observer
from ..loading import DEMO_MODEL, find
from ..routing.pair import NAMES
from . import ServerSettings
from .app import server_application
from .provider import GearedProvider, ServedModel
from .requests import Options
from .scheduler import Scheduler, join_to_the_end
from .web import Guard, Server

MODE_OF_OPTION = {"gear": "static", "thresholds": "route", "draft": "lossless"}
GEAR_OPTIONS = "gear", "draft"


def modes_of(geared: Geared, has_draft_model: bool, governed: bool) -> tuple[str, ...]:
    """Return the modes that requests may name."""
    if not isinstance(geared.gearbox, Gearbox):
        return (TELEMETRY_ONLY,)
    if governed:
        return ROUTE, KICKDOWN
    if has_draft_model:
        return (LOSSLESS,)
    return SHIFTING


def mode_of_request(geared: Geared, modes: tuple[str, ...], default: Mode, options: Options, prompt: str) -> Mode:
    """Return the requested or default mode, with the request's options.

    Raises GearbxError for a mode or gear that is not available here, and for options of a different mode.
    """
    flags = geared.loaded.decision.settings.mode
    given = {name: value for name, value in options if name != "mode" and value is not None}
    requested = options.mode or mode_of_options(given, default)
    if requested is not None and requested not in modes:
        raise GearbxError(f"mode '{requested}' is not served here; {choose(requested, modes)}")
    mode = default if requested in (None, default.name) else make_mode(requested, flags.given_to_others())
    own = {item.name for item in fields(mode)}
    for name, value in given.items():
        refuse_unless(name in own, name, mode.name)
        with error_context(name):
            setting = geared.gearbox.ladder.find(value).name if name in GEAR_OPTIONS else tuple(value)
            mode = replace(mode, **{name: setting})
    return geared.mode(prompt, mode).resolved(geared.gearbox, geared.loaded.tokenizer, None)


def with_lookup(mode: Mode, is_shared: bool) -> Mode:
    """Return a mode whose prompt lookup learns from all requests, or from each request alone."""
    return replace(mode, share_lookup=is_shared) if isinstance(mode, Lossless) else mode


def mode_of_options(given: Mapping[str, Any], default: Mode) -> str | None:
    """Return the mode that a request's options imply; None for the server's default."""
    own = {item.name for item in fields(default)}
    return next((mode for name, mode in MODE_OF_OPTION.items() if name in given and name not in own), None)


def refuse_unless(is_option: bool, field: str, mode: str) -> None:
    if not is_option:
        raise GearbxError(f"{field}: not an option of mode '{mode}'; omit it, or use a different mode")


def serve_pair(pair: LoadedPair, flags: Mapping[str, Any]) -> ServedModel:
    """Return a served pair with these mode flags."""

    def mode(options: Options, prompt: str) -> Mode:
        if options.mode not in (None, PAIR):
            raise GearbxError(f"mode '{options.mode}' is not served here; two models take turns, use {PAIR}")
        for name in GEAR_OPTIONS:
            refuse_unless(getattr(options, name) is None, name, PAIR)
        own = {} if options.thresholds is None else {"thresholds": tuple(options.thresholds)}
        return pair.mode({**flags, **own})

    return ServedModel(
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


@contextmanager
def serving_model(settings: ServerSettings, guard: Guard) -> Iterator[Server]:
    """Yield the server of a model; it answers until the context ends. Raises GearbxError."""
    with Server(settings.listen.host, settings.listen.port, guard.request_timeout) as server:
        provider = GearedProvider(settings, partial(prepared, settings))
        concurrency = settings.concurrency
        prompt_cache = LRUPromptCache(concurrency.prompt_cache_size, concurrency.prompt_cache_bytes or 1 << 63)
        server.description = description_of(provider)
        scheduler = Scheduler(provider, prompt_cache)
        try:
            server.start(server_application(guard, scheduler))
            yield server
        finally:
            scheduler.stopping = True
            server.stop()
            join_to_the_end(scheduler.thread)
            provider.unload()


def description_of(provider: GearedProvider) -> str:
    """Return a short description of the models. In the caller, a local variable would keep a replaced model alive."""
    served = provider.served
    if served is None:
        return f"serving {', '.join(provider.catalog)}, each on demand"
    return f"serving {provider.name}, mode {served.default_mode}, gears {', '.join(served.gears)}"


def prepared(settings: ServerSettings, path: str | None, adapter: str | None) -> Callable[[], ServedModel]:
    """Return the loader of a model or pair. Raises GearbxError for a missing model, or unsuitable flags."""
    model, template = replace(settings.model, model=path, adapter_path=adapter), settings.answers.chat_template
    small = settings.mode.small_model
    if small is not None:
        find(path or DEMO_MODEL)
        return lambda: serve_pair(load_pair(model, small, template), settings.mode.given())
    settings = replace(settings, model=model)
    described = describe(settings)
    decide(settings, described, several_modes=True)  # refuses while the previous model is still loaded

    def load() -> ServedModel:
        free = replace(described, machine=machine_for(settings))  # the previous model's memory is free by now
        decision = decide(settings, free, several_modes=True)
        return load_geared(decision, template, settings.concurrency.share_lookup)

    return load


def load_geared(decision: Decision, template: str, share_lookup: bool) -> ServedModel:
    """Load a model with its gears. Raises GearbxError."""
    settings = decision.settings
    with ExitStack() as stack:
        loaded = Loaded.of(decision, template)
        draft_model = load_draft_model(settings.cache.draft_model, loaded.tokenizer, loaded.model)
        geared = loaded.in_gears()
        check_in_ladder(settings.mode, geared.gearbox.ladder)
        check_prompt_gear(settings.mode.prompt_gear, geared.gearbox)
        controller = stack.enter_context(geared.governor())
        modes = modes_of(geared, draft_model is not None, controller is not None and controller.caps)
        default = geared.loaded.decision.mode
        own = with_lookup(geared.mode("").resolved(geared.gearbox, loaded.tokenizer, None), share_lookup)

        def mode(options: Options, prompt: str) -> Mode:
            if options == Options() and not hasattr(own, "initial_gear"):  # the prompt selects an initial gear
                return own
            return with_lookup(mode_of_request(geared, modes, default, options, prompt), share_lookup)

        return ServedModel(
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
            close=stack.pop_all().close,  # stops the controller's sensors
        )


def check_prompt_gear(gear: str | None, gearbox: Gearbox | Observer) -> None:
    """Validate a prefill gear before the first request. Raises GearbxError for a model in one precision."""
    if gear not in (None, SAME) and not isinstance(gearbox, Gearbox):
        raise GearbxError(f"--prompt-gear {gear}: this model has one precision; omit the flag")
