"""Any combination of mode, model, gears, cache and sampling: two turns with one KV cache, the tokens of plain decoding.

Three examples for each class of mlx-lm's models; a few classes run by default. Nine others of each, 1,098 in all:

    HYPOTHESIS_SEARCH=1 python -m pytest -n logical -m '' -k as_in_plain_decoding tests/decoding/test_two_turns.py
"""

import copy
import itertools
import os
import random
import re
import zlib
from dataclasses import dataclass

import mlx.core as mx
import pytest
from architectures import LOSSLESS, installed, tiny, why_not
from conftest import tiny_model
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from lossless_texts import endless
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError, Kickdown, Lossless, Pair, Static, stream_generate
from gearbx_mlx.compat.loops import streaming_with
from gearbx_mlx.decoding.caches import length, parts, total_tokens
from gearbx_mlx.decoding.sampling import reader_of

pytestmark = pytest.mark.usefixtures("native")

TURNS = [1, 5, 9, 2, 7, 3, 8], [4, 4, 6]
IS_SEARCH = "HYPOTHESIS_SEARCH" in os.environ
EXAMPLES = 9 if IS_SEARCH else 3  # of each architecture
FEW = {"llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "lfm2", "rwkv7"}
ABLE = [name for name in installed() if why_not(name) is None and name not in LOSSLESS]
CASES = [name if name in FEW else pytest.param(name, marks=pytest.mark.matrix) for name in ABLE]

GEARS = {
    "planes": ["16", "4,16", "3,16", "4,8", "3,5,8", "4,8,16"],
    "affine": ["4,16", "6,16", "4,8", "4,8,16"],
    "exact": ["4,16"],  # of weights in bfloat16
    "rowwise": ["4,16", "2,8", "4,8,16"],
    "groupwise": ["4,16"],
    "codebook": ["3,16", "4,6"],
    "codebook-library": ["3,16"],
}
GROUPED = "planes", "affine", "exact"  # whose groups may be as narrow as these models
FORMATS = [*GEARS, *[name for name in GEARS if "codebook" not in name] * 3]  # codebooks take seconds to make
CACHES = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"max_kv_size": st.integers(6, 40)}),
    st.fixed_dictionaries({"kv_gears": st.sampled_from(["4,16", "8,16", "4,8,16", "8"])}),
    st.fixed_dictionaries(
        {
            "kv_bits": st.sampled_from([4, 8]),
            "kv_group_size": st.just(32),
            "quantized_kv_start": st.one_of(st.just(0), st.integers(1, 30)),
        }
    ),
)
TEMPERATURES = st.fixed_dictionaries(
    {"temp": st.sampled_from([0.3, 1.0, 1.5])},
    optional={"top_p": st.sampled_from([0.5, 0.9]), "top_k": st.integers(1, 20), "min_p": st.sampled_from([0.05, 0.3])},
)
PENALTIES = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([1.1, 1.5]),
        "presence_penalty": st.just(0.5),
        "frequency_penalty": st.just(0.4),
        "logit_bias": st.just({5: -2.0, 7: 1.0}),
    },
)


def held(gear):
    """Mode kickdown in one gear."""
    return Kickdown(rule=lambda *_: gear == "high", prompt_gear=gear)


LENGTHS = st.none() | st.integers(1, 15)
MODES = st.one_of(
    *(st.builds(Lossless, draft_length=LENGTHS, lookup_tokens=st.none() | st.integers(0, 15)),) * 3,
    st.sampled_from(["high", "low"]).map(held),
    st.sampled_from(["small", "large"]),  # the only one of a pair that has a turn
)
TOKENS = st.lists(st.integers(1, 20), min_size=1, max_size=20)


@dataclass(frozen=True)
class Turn:
    """tokens: the most that are generated. taken: of them, before the text is closed; None: all."""

    prompt: list[int]
    tokens: int
    taken: int | None


@dataclass(frozen=True)
class Case:
    mode: object
    turns: tuple[Turn, Turn]
    format: str
    gears: str
    kernels: str
    activations: str
    dtype: mx.Dtype
    cache: dict
    sampler: dict | None
    is_ours: bool
    penalties: dict
    prefill_step_size: int
    draft_seed: int | None
    drafted: int
    seed: int

    def sampling(self) -> dict:
        """Keywords of sampling, and of reading the prompt."""
        make = gearbx_mlx.make_sampler if self.is_ours else make_sampler
        found: dict = {"prefill_step_size": self.prefill_step_size}
        if self.sampler is not None:
            found["sampler"] = make(**self.sampler)
        if self.penalties:
            found["logits_processors"] = make_logits_processors(**self.penalties)
        return found


@st.composite
def cases(draw):
    mode, format, kernels = draw(MODES), draw(st.sampled_from(FORMATS)), draw(st.sampled_from(["mlx", "native"]))
    types = [mx.bfloat16] if format == "exact" else [mx.float32, mx.bfloat16]
    rounds = kernels == "native" and "codebook" not in format
    turn = st.builds(Turn, TOKENS, st.integers(1, 30), st.none() | st.integers(1, 12))
    return Case(
        mode=mode,
        turns=(draw(turn), draw(turn)),
        format=format,
        gears=draw(st.sampled_from(GEARS[format])),
        kernels=kernels,
        activations=draw(st.sampled_from(["int16", "int8", "float"] if rounds else ["int16"])),
        dtype=draw(st.sampled_from(types)),
        cache=draw(CACHES),
        sampler=draw(st.none() | TEMPERATURES),
        is_ours=draw(st.booleans()),
        penalties=draw(PENALTIES),
        prefill_step_size=draw(st.sampled_from([1, 3, 8, 2048])),
        draft_seed=draw(st.sampled_from([None, None, 0, 1])),
        drafted=draw(st.integers(1, 8)),
        seed=draw(st.integers(0, 99)),
    )


def given_to(cache):
    """How many tokens the entries of a KV cache were given, of those that count them."""
    return {total_tokens(part) for part in parts(cache)} - {None, 0}  # some layers have an entry and no attention


def written(case, stream, cache, **keywords):
    """Tokens of both turns, what the parts of the KV cache were given, and the random state afterwards."""
    found = []
    mx.random.seed(case.seed)
    for turn in case.turns:
        run = stream(turn.prompt, max_tokens=turn.tokens, prompt_cache=cache, **keywords)
        found.append([response.token for response in itertools.islice(run, turn.taken)])
        run.close()
    return found, given_to(cache), mx.random.state[0].tolist()


def of_gears(case, architecture):
    """What a mode writes in a gearbox, and mode static in its gear."""
    tokenizer = endless()
    gearbox = Gearbox(
        tiny(architecture, case.dtype),
        case.gears,
        format=case.format,
        kernels=case.kernels,
        activations=case.activations,
        group_size=32 if case.format in GROUPED else None,
    )
    keywords = case.sampling() | case.cache
    size, drafted = keywords.pop("max_kv_size", None), {}
    if isinstance(case.mode, Lossless) and case.draft_seed is not None and "kv_gears" not in case.cache:
        drafted = {"draft_model": tiny(architecture, seed=case.draft_seed), "num_draft_tokens": case.drafted}
    gear = "low" if getattr(case.mode, "prompt_gear", None) == "low" and len(gearbox.ladder) > 1 else "high"
    mode = case.mode if isinstance(case.mode, Lossless) else Kickdown(rule=case.mode.rule, prompt_gear=gear)

    def stream(mode, prompt, **how):
        return stream_generate(gearbox.model, tokenizer, prompt, gearbox=gearbox, mode=mode, **how)

    def cache(*others):
        return [entry for model in (gearbox.model, *others) for entry in make_prompt_cache(model, size)]

    def ours():
        return written(case, lambda *a, **k: stream(mode, *a, **k), both, **keywords, **drafted)

    both = cache(*(model for name, model in drafted.items() if name == "draft_model"))
    try:
        own = cache()
        theirs = written(case, lambda *a, **k: stream(Static(gear, prompt_gear=gear), *a, **k), own, **keywords)
    except GearbxError as refused:
        with pytest.raises(GearbxError, match=re.escape(str(refused))):
            ours()
        reject()
    try:
        tokens, _, state = ours()
    except GearbxError as refused:
        if "draft" not in str(refused):
            raise
        reject()
    return (tokens, given_to(both[: len(own)]), state), theirs


def of_pair(case, architecture):
    """What a pair writes in which one model has all turns, and what mlx-lm writes with that model."""
    small, large = (tiny(architecture, seed=seed) for seed in (1, 2))
    alone = {"small": small, "large": large}[case.mode]
    if "kv_gears" in case.cache:
        reject()
    tokenizer = copy.copy(endless())
    object.__setattr__(tokenizer, "get_vocab", dict)  # whose tokens these models do not have
    keywords = case.sampling() | case.cache
    size = keywords.pop("max_kv_size", None)
    mode = Pair(small, threshold=0 if case.mode == "large" else float("inf"))

    def ours(prompt, **how):
        return stream_generate(large, tokenizer, prompt, mode=mode, **how)

    def theirs(prompt, **how):
        return streaming_with(reader_of().logsumexp)(alone, tokenizer, prompt, **how)

    try:
        found = written(case, ours, mode.make_cache(large, size), **keywords)
    except GearbxError:
        reject()
    return found, written(case, theirs, make_prompt_cache(alone, size), **keywords)


@pytest.mark.filterwarnings("ignore:drafting failed")  # where a window is full
@pytest.mark.filterwarnings("ignore:.*drafting is disabled")  # a model that keeps states
@pytest.mark.parametrize("architecture", CASES)
def test_second_turn_continues_as_in_plain_decoding(architecture):
    number = random.getrandbits(64) if IS_SEARCH else zlib.crc32(architecture.encode())

    @seed(number)
    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=[*HealthCheck])
    @given(cases())
    def check(case):
        ours, theirs = (of_pair if isinstance(case.mode, str) else of_gears)(case, architecture)
        assert ours == theirs

    check()


@pytest.mark.parametrize("start", [9, 12])
@pytest.mark.parametrize("taken", [1, 2, 4, 6])
def test_close_after_cache_quantization_leaves_no_extra_entry(start, taken):
    gearbox = Gearbox(tiny_model(), "6,16", kernels="mlx")
    cache, how = make_prompt_cache(gearbox.model), {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    mode = Lossless(draft_length=3, lookup_tokens=0)
    run = stream_generate(gearbox.model, endless(), TURNS[0], 30, gearbox=gearbox, mode=mode, prompt_cache=cache, **how)
    assert len(list(itertools.islice(run, taken))) == taken
    run.close()
    assert {length([part]) for part in cache} == {len(TURNS[0]) + taken}


@pytest.mark.parametrize("mode", [Lossless(draft_length=3), held("high")], ids=["lossless", "kickdown"])
def test_single_token_prefill_precedes_cache_quantization(mode):
    gearbox, found = Gearbox(tiny("llama"), "6,16"), []
    for each in (Static("high"), mode):
        how = {"gearbox": gearbox, "mode": each, "kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}
        found.append([r.token for r in stream_generate(gearbox.model, endless(), [19], 20, **how)])
    assert found[0] == found[1]


@pytest.mark.parametrize("architecture", ["iquestloopcoder", "nanbeige", "longcat_flash_ngram"])
def test_layers_with_two_caches_use_all_entries(architecture):
    gearbox, found = Gearbox(tiny(architecture), "6,16", group_size=32), []
    for mode in (Static("high"), Lossless(draft_length=3)):
        cache = make_prompt_cache(gearbox.model)
        assert len(cache) > len(gearbox.model.layers)
        how = {"gearbox": gearbox, "mode": mode, "prompt_cache": cache}
        found.append([r.token for turn in TURNS for r in stream_generate(gearbox.model, endless(), turn, 20, **how)])
    assert found[0] == found[1]


def test_draft_model_remembers_first_turn():
    gearbox, other = Gearbox(tiny_model(), "16"), tiny_model()
    cache = [*make_prompt_cache(gearbox.model), *make_prompt_cache(other)]
    for prompt in TURNS:
        how = {"gearbox": gearbox, "mode": Lossless(draft_length=3), "prompt_cache": cache, "draft_model": other}
        responses = list(stream_generate(gearbox.model, endless(), prompt, 20, **how))
        assert sum(r.from_draft for r in responses) == sum(r.drafted for r in responses)  # they are one model
    assert len({length([part]) for part in cache}) == 1


def test_draft_model_has_cache_beside_shared_ones():
    gearbox, found = Gearbox(tiny_model("gemma3n"), "16"), []
    for mode, others in ((Static(), []), (Lossless(draft_length=3), [tiny_model()])):
        cache = [entry for model in (gearbox.model, *others) for entry in make_prompt_cache(model)]
        how = {"gearbox": gearbox, "mode": mode, "prompt_cache": cache} | ({"draft_model": others[0]} if others else {})
        found.append([r.token for turn in TURNS for r in stream_generate(gearbox.model, endless(), turn, 20, **how)])
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", [Lossless(draft_length=3), Kickdown((1.0,))], ids=["lossless", "kickdown"])
@pytest.mark.parametrize("count", [3, 9])
def test_embeddings_of_other_prompt_are_refused(mode, count):
    gearbox = Gearbox(tiny_model("qwen3"), "4,16")
    with pytest.raises(GearbxError, match=f"one vector per token of the prompt, got {count} for 7"):
        stream_generate(
            gearbox.model, endless(), TURNS[0], 5, gearbox=gearbox, mode=mode, input_embeddings=mx.zeros((count, 64))
        )
