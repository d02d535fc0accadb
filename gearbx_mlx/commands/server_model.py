"""Serve a model in gears, or two models that take turns."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache

from ..cli.geared import Settled, settle
from ..cli.generation import load_draft_model
from ..cli.governing import governor
from ..cli.loaded_pair import load_pair
from ..cli.pair import turns_of
from ..cli.parsers.server import ServerSettings
from ..cli.served import serve_geared, serve_pair
from ..loading import DEMO_MODEL, find
from ..serving.app import server_application
from ..serving.listening import Server
from ..serving.metrics import Gauges, Metrics
from ..serving.provider import GearedProvider, Served
from ..serving.scheduler import Scheduler
from ..serving.web import Guard

MOST_BYTES = 1 << 63


@contextmanager
def serving(settings: ServerSettings, guard: Guard) -> Iterator[Server]:
    """A server that listens and has its model; it answers while the context lasts.

    Raises:
        GearbxError: an address that is taken, a model that cannot be loaded.
    """
    with Server(settings.listen.host, settings.listen.port, guard.patience) as server:
        prepare = partial(prepared, settings)
        provider = GearedProvider(cli_args(settings), settings.model.model, prepare, settings.listen.allow_models)
        concurrency = settings.concurrency
        kept = LRUPromptCache(concurrency.prompt_cache_size, concurrency.prompt_cache_bytes or MOST_BYTES)
        scheduler = Scheduler(provider, kept)
        server.serves = said_of(provider)
        try:
            server.start(server_application(guard, scheduler, Metrics(gauges(scheduler))))
            yield server
        finally:
            scheduler.stop_and_join()
            server.stop()
            provider.forget()


def gauges(scheduler: Scheduler) -> Gauges:
    """What /metrics reads at the moment it is asked."""
    return {
        "requests_running": ("Answers in the making", lambda: scheduler.running),
        "requests_waiting": ("Requests that wait for their turn", lambda: scheduler.queued),
        "memory_bytes": ("Bytes of MLX's arrays", mx.get_active_memory),
        "peak_memory_bytes": ("The most bytes that MLX's arrays had", mx.get_peak_memory),
    }


def said_of(provider: GearedProvider) -> str:
    """What is served, in a few words."""
    served = provider.served
    assert served is not None
    return f"serving {provider.name}, mode {served.default_mode}, gears {', '.join(served.gears)}"


def prepared(settings: ServerSettings, path: str | None, adapter: str | None) -> Callable[[], Served]:
    """What loads a model with its gears, or a pair. Raises GearbxError where there is none, or flags do not fit it."""
    model, template = replace(settings.model, model=path, adapter_path=adapter), settings.answers.chat_template
    find(path or DEMO_MODEL)
    if settings.mode.small_model is not None:
        turns = turns_of(settings.routing.thresholds, settings.gate)
        return lambda: serve_pair(
            load_pair(model, settings.mode.small_model or "", template), turns, settings.routing.initial_gear
        )
    settled = settle(replace(settings, model=model))
    return lambda: load_geared(settings, settled, path, template)


def load_geared(settings: ServerSettings, settled: Settled, path: str | None, template: str) -> Served:
    """A model with its gears, as it is served. Raises GearbxError for one that cannot be loaded."""
    with ExitStack() as stack:
        loaded = settled.load(path, template)
        draft_model = load_draft_model(settings.cache.draft_model, loaded.tokenizer)
        geared = loaded.in_gears()
        controller = None
        if settings.controller.wanted:
            further = geared.gears.governor_keywords()
            controller = stack.enter_context(governor(settings.controller, geared.gearbox, True, **further))
        return serve_geared(geared, draft_model, controller, stack.pop_all().close)


def cli_args(settings: ServerSettings) -> argparse.Namespace:
    """The flags as mlx-lm's server has them, for the parts of it that are at work here."""
    groups = settings.listen, settings.answers, settings.concurrency, settings.cache
    values = {name: value for group in groups for name, value in vars(group).items()}
    values |= {"model": settings.model.model, "adapter_path": settings.model.adapter_path, "pipeline": False}
    values |= {"trust_remote_code": settings.model.trust_remote_code}
    values["chat_template_args"] = settings.answers.template_arguments()
    return argparse.Namespace(**values)
