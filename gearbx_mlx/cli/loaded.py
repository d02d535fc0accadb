"""The model that the settings name, and the room that a prompt leaves in its context."""

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.utils import get_total_parameters
from msgspec import Struct

from ..compat.arrays import dtype_name
from ..decoding.caches import KeptCache, check_prompt_cache, plain_cache
from ..decoding.pair import Pair, bytes_read
from ..decoding.route import SHORT_PROMPTS
from ..decoding.sampling import sampler_for
from ..errors import GearbxError, GearbxWarning, about, one_line
from ..files.model_directory import context_length
from ..files.reading import json_lines, parse_json, read_text, shown, typed
from ..files.writing import replacing
from ..formats import get_format
from ..gears.activations import compute_in, model_dtype, stored_dtype
from ..gears.cost import ModelFiles, needed_memory, read_files
from ..gears.discovery import is_quantized, vocabulary
from ..gears.ladder import WHOLE, WHOLE_LADDER, Ladder
from ..gears.saved import saved_gears
from ..kernels.device import recommended_memory
from ..loading import DEMO_MODEL, find, load, load_small, model_name
from ..ranks.place import current
from ..routing.pair import NAMES, parameter_ratio
from ..telemetry.summary import Tally, summarize
from .flags import CacheSettings, ModelSettings, SamplingSettings, cache_keywords, check_sampling
from .gears import GearSettings
from .settings import human_bytes
from .tables import Speed


def warn_of_memory(model: str | None, gears: GearSettings, whole: bool = False) -> None:
    """Warn of a model that needs more memory than macOS recommends for the GPU, and name gears that would fit.

    Args:
        model: as `load` takes it.
        whole: whether a model of bfloat16 gets format exact, as mode lossless does.
    """
    most = recommended_memory()
    if most is None or gears.ladder is None or gears.residency == "stream":
        return
    files = files_of(model)
    if files is None:
        return
    if whole and all(entry.dtype == "BF16" for entry in files.matrices.values()):
        gears = dataclasses.replace(gears, format=WHOLE, ladder=Ladder.parse(WHOLE_LADDER))
    needed = memory_with(files, gears)
    if needed > most:
        remedies = [] if files.is_quantized else fitting(files, gears, most)
        advice = f"{' or '.join(remedies)} would fit" if remedies else "expect it to be slow"
        warn(model_name(model), needed, most, advice)


def warn_of_pair(small: str, large: str | None) -> None:
    """As `warn_of_memory`, of two models that are in memory together."""
    most = recommended_memory()
    found = [] if most is None else [files_of(small), files_of(large)]
    needed = sum(files.total for files in found if files is not None)
    if most is not None and needed > most:
        warn(f"the pair of {small} and {model_name(large)}", needed, most, "give quantized models")


def warn(what: str, needed: int, most: int, advice: str) -> None:
    sizes = f"needs about {human_bytes(needed)}, and this GPU should have at most {human_bytes(most)}"
    warnings.warn(f"{what} {sizes}: {advice}", GearbxWarning, stacklevel=3)


def files_of(model: str | None) -> ModelFiles | None:
    """What the headers of a model's files say; None where they cannot be read: `load` says what is wrong with them."""
    try:
        return read_files(find(model or DEMO_MODEL))
    except (GearbxError, OSError):
        return None


def memory_with(files: ModelFiles, gears: GearSettings) -> int:
    """Bytes that a model in these gears needs."""
    bits = [gear.bits for gear in gears.gears]
    return needed_memory(files, bits, get_format(gears.format), gears.group_size, gears.residency == "resident")


def fitting(files: ModelFiles, gears: GearSettings, most: int) -> list[str]:
    """Changes that make it fit: the most gears from the lowest on, and the residency that has one gear in memory."""
    found = []
    bits = [gear.bits for gear in gears.gears]
    can_drop = not get_format(gears.format).ladders or files.manifest is not None
    for count in range(len(bits) - 1, 0, -1) if can_drop else ():
        fewer = dataclasses.replace(gears, ladder=Ladder(bits[:count]))
        needed = memory_with(files, fewer)
        if needed <= most:
            found.append(f"--gears {fewer.ladder} ({human_bytes(needed)})")
            break
    one = dataclasses.replace(gears, residency="disk")
    if gears.residency == "resident" and can_drop and memory_with(files, one) <= most:
        found.append("--residency disk")
    return found


def generation_keywords(
    sampling: SamplingSettings, cache: CacheSettings, tokenizer: Any, prompt_cache: Any = None
) -> dict[str, Any]:
    """Keywords of mlx-lm's stream_generate.

    Raises:
        GearbxError: numbers beyond the vocabulary, a draft model that cannot be loaded or has another vocabulary.
    """
    check_sampling(sampling, tokenizer.vocab_size)
    chosen = {name: value for name, value in vars(sampling).items() if name != "seed"}
    sampler = sampler_for(tokenizer, **chosen)
    draft_model = load_draft_model(cache.draft_model, tokenizer)
    return {**cache_keywords(cache), "sampler": sampler, "prompt_cache": prompt_cache, "draft_model": draft_model}


def load_draft_model(path: str | None, tokenizer: Any) -> Any:
    """mlx-lm's draft model, or None. Raises GearbxError for another vocabulary."""
    if path is None:
        return None
    model, own = load(path)
    if own.vocab_size != tokenizer.vocab_size:
        raise GearbxError(f"--draft-model {path}: its vocabulary is not that of the model")
    compute_in(model, "auto", is_quantized(model))
    return model


CONVERSATION = "conversation"  # where it is in the metadata


@dataclass(frozen=True)
class Begun:
    """A conversation that goes on.

    before: its text up to where the next message begins. templated: a chat template made it.
    tokens: those in the cache.
    """

    before: str
    templated: bool
    tokens: list[int]


@dataclass(frozen=True)
class PromptCache:
    """The caches of a model's layers, as a file has them; `begun` is None for one that no chat saved."""

    file: str
    model: str
    entries: list[Any]
    begun: Begun | None

    def before(self, templated: bool) -> str:
        """What stands before the message in the template's place; "" where the cache is all that is known of it."""
        return self.begun.before if self.begun is not None and self.begun.templated == templated else ""

    def unread(
        self, model: nn.Module, tokens: list[int], max_kv_size: int | None, before: str
    ) -> tuple[list[int], list[Any]]:
        """Those of the tokens that the cache does not have, and the caches that go on with them.

        Args:
            max_kv_size: of caches that are made anew, as where states cannot be cut to what the tokens begin with.
            before: what the tokens begin with; "": they follow the cache.

        Raises:
            GearbxError: the cache does not suit the model.
        """
        with about(self.file):
            check_prompt_cache(self.entries, model)
        if not before or self.begun is None:
            return tokens, self.entries
        kept = KeptCache(lambda: make_prompt_cache(model, max_kv_size))
        kept.entries, kept.tokens = self.entries, self.begun.tokens
        return kept.unread(tokens), kept.entries


def save_cache(path: Path, entries: list[Any], model: str, begun: Begun) -> None:
    """Write the cache of a chat. Raises GearbxError where it cannot be written."""
    metadata = {"model": model, "tokenizer_config": "{}", CONVERSATION: msgspec.json.encode(asdict(begun)).decode()}
    with replacing(path) as place:
        beside = place.with_name(f"{place.name}.safetensors")  # save_safetensors adds the suffix to any other name
        try:
            save_prompt_cache(str(beside), plain_cache(entries), metadata)
            beside.replace(place)
        except RuntimeError as error:  # MLX's, of a disk that is full for instance
            raise GearbxError(f"{path}: cannot be written ({one_line(error)}); choose another place") from error
        finally:
            beside.unlink(missing_ok=True)


def load_cache(file: str | None, model: str | None) -> PromptCache | None:
    """A prompt cache; None without a file.

    Raises:
        GearbxError: not a prompt cache, or one of another model than the one that is named.
    """
    if file is None:
        return None
    try:
        entries, metadata = load_prompt_cache(file, return_metadata=True)
        mx.eval([part.state for part in entries])  # reads the values, which a truncated file does not have
        made_with = metadata["model"]
        said = metadata.get(CONVERSATION)
        begun = None if said is None else typed(parse_json(said), Begun)
    except Exception as error:  # a file of another kind fails in any way
        raise GearbxError(
            f"{file}: not a prompt cache ({one_line(error)}); make one with mlx_lm.cache_prompt"
        ) from error
    if model not in (None, made_with):
        raise GearbxError(f"{file}: made with the model {made_with}, not {model}; name that one")
    return PromptCache(file, made_with, entries, begun)


GIVE = "give one prompt per line, or JSON Lines"
MIXED = SHORT_PROMPTS
TRIVIAL = (
    "Count from one to twenty: one, two, three, four,",
    "The days of the week are Monday, Tuesday, Wednesday,",
    "A cat has 4 legs. How many legs does a cat have?",
)
HARD = (
    "Prove that there are infinitely many prime numbers.",
    "A train leaves at 60 miles an hour and another at 75 from a town 300 miles away. When do they meet?",
    "Describe a colour that nobody has ever seen.",
)


class Row(Struct, frozen=True):
    """A line of JSON Lines: the prompt is the first of these fields that has text in it."""

    question: str | None = None
    prompt: str | None = None
    text: str | None = None


def read_prompts(path: Path) -> list[str]:
    """One prompt per line, or of JSON Lines the field "question" (GSM8K), "prompt" or "text".

    Raises:
        GearbxError: a file that cannot be read, has no prompt, or has a line that is not such an object.
    """
    text = read_text(path, "text", GIVE)
    if path.suffix in (".jsonl", ".json"):
        prompts = [prompt_of(row, f"{path}, line {number}") for number, row in json_lines(path, text, Row, GIVE)]
    else:
        prompts = [line.strip("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise GearbxError(f"{path}: has no prompt; give one per line")
    return prompts


def prompt_of(row: Row, place: str) -> str:
    """Raises GearbxError for a line without text."""
    for found in (row.question, row.prompt, row.text):
        if found and found.strip():
            return found
    raise GearbxError(f"{place}: no field 'question', 'prompt' or 'text' with text in it")


def trust(trust_remote_code: bool) -> dict[str, Any]:
    """The keyword of `load` that trusts remote code; named only when asked for: mlx-lm before 0.32 does not know it."""
    return {"trust_remote_code": True} if trust_remote_code else {}


def load_model(settings: ModelSettings, chat_template: str = "") -> tuple[nn.Module, Any, dict]:
    """Model, tokenizer and configuration. A `chat_template` replaces the tokenizer's.

    Raises:
        GearbxError: as `load`; a pipeline of one process; an end-of-text token that the vocabulary does not have.
    """
    keywords = trust(settings.trust_remote_code) | {"adapter_path": settings.adapter_path}
    if chat_template:
        keywords["tokenizer_config"] = {"chat_template": chat_template}
    run = current()
    if run is None and settings.pipeline:
        raise GearbxError("--pipeline is for several ranks, and this process runs alone; start them with mlx.launch")
    if run is not None:
        keywords |= {"group": run.group, "pipeline": settings.pipeline}
    model, tokenizer, config = load(settings.model, return_config=True, **keywords)
    known = tokenizer.get_vocab() if settings.extra_eos_token else {}
    for token in settings.extra_eos_token:
        if token not in known and token not in map(str, known.values()):  # mlx-lm takes others, for no token at all
            raise GearbxError(f"--extra-eos-token {shown(token)}: is not in the vocabulary; give a token or its number")
        tokenizer.add_eos_token(token)
    return model, tokenizer, config


def load_original(settings: ModelSettings) -> tuple[nn.Module, Any, dict]:
    """As `load_model`. Raises GearbxError for a model that is quantized, or whose checkpoint has gears."""
    model, tokenizer, config = load_model(settings)
    if is_quantized(model) or saved_gears(model) is not None:
        raise GearbxError(f"{model_name(settings.model)}: is no original model; give the one that it was made from")
    return model, tokenizer, config


def room_for(
    config: Mapping[str, Any],
    prompt_tokens: int,
    max_tokens: int,
    max_kv_size: int | None = None,
    what: str = "the prompt",
    remedy: str = "shorten the prompt",
) -> int:
    """How many tokens to generate after a prompt: a rotating cache (max_kv_size) forgets, and so has no end.

    `prompt_tokens` counts those of a prompt cache as well. `what` and `remedy` are the words of the error.

    Raises:
        GearbxError: the prompt leaves no room in the model's context.
    """
    context = context_length(dict(config))
    if context is None:
        return max_tokens
    if prompt_tokens >= context:
        raise GearbxError(f"{what} is {prompt_tokens} tokens, and the model's context {context}; {remedy}")
    if max_kv_size is not None:
        return max_tokens
    room = context - prompt_tokens
    return room if max_tokens == -1 else min(max_tokens, room)


@dataclass(frozen=True)
class LoadedPair:
    """Two loaded models and their figures: (small, large) each."""

    small: nn.Module
    large: nn.Module
    tokenizer: Any
    config: dict

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.small, self.large

    @property
    def vocab_size(self) -> int:
        return min(vocabulary(model) for model in self.models)

    @property
    def parameters(self) -> tuple[int, int]:
        """Numbers of parameters; quantized ones count as the weights that they stand for."""
        small, large = (int(get_total_parameters(model)) for model in self.models)
        return small, large

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Bytes that a token reads, in the type of the checkpoint."""
        return bytes_read(self.small), bytes_read(self.large)


def load_pair(settings: ModelSettings, small_model: str, chat_template: str = "") -> LoadedPair:
    """Both models as loaded, in the type that --dtype asks for.

    Raises:
        GearbxError: a model that cannot be loaded, or another tokenizer.
    """
    warn_of_pair(small_model, settings.model)
    large, tokenizer, config = load_model(settings, chat_template)
    small = load_small(small_model, tokenizer, **trust(settings.trust_remote_code))
    for model in (small, large):
        compute_in(model, settings.dtype, is_quantized(model))
    return LoadedPair(small, large, tokenizer, config)


def summary_of_pair(
    names: tuple[str, str | None], pair: LoadedPair, mode: Pair, tally: Tally, speed: Speed, peak_memory: int
) -> dict[str, Any]:
    """The summary of one run.

    Args:
        names: of the small and the large model, as given.
        mode: with its threshold.
        peak_memory: bytes.
    """
    read, parameters = dict(zip(NAMES, pair.weight_bytes)), dict(zip(NAMES, pair.parameters))
    bits = {name: 8 * read[name] / parameters[name] for name in NAMES}
    return summarize(
        tally,
        model=model_name(names[1]),
        small_model=names[0],
        mode=mode.name,
        ladder=[{"name": name, "bits": bits[name], "bytes_per_weight": bits[name] / 8} for name in NAMES],
        bits_per_weight=bits,
        weight_bytes=read,
        of_mode=mode.summary(tally),
        parameters=parameters,
        parameter_ratio=parameter_ratio(tally.mean(tally.gear_tokens["large"]), pair.parameters),
        threshold_bits=mode.threshold,
        window=mode.window,
        min_gear_duration=mode.min_gear_duration,
        tokens_per_second=speed.tokens_per_second,
        prompt_tokens=speed.prompt_tokens,
        prompt_tokens_per_second=speed.prompt_tokens_per_second,
        peak_memory_bytes=peak_memory,
        compute_dtype=dtype_name(model_dtype(pair.large)),
        storage_dtype=dtype_name(stored_dtype(pair.large)),
    )
