"""Texts that share each pass over the weights: each is the same as alone, and each reports its own gears."""

import mlx.core as mx
import pytest
from conftest import MANY_VECTORS, PROMPT, normal, tiny_model
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache
from mlx_lm.sample_utils import make_sampler

from gearbx_mlx import Gearbox, GearbxError, Kickdown, Lossless, Route, Static, batch_generate, stream_generate
from gearbx_mlx.decoding.stream import batch_generator
from gearbx_mlx.formats import block
from gearbx_mlx.loading import load

PROMPTS = ["Once upon a time", "Tom has 5 apples and buys 7 more. How many does he have?", "The king", "The king"]
ROOM = [24, 9, 16, 1]
NEVER, ALWAYS = (60.0,), (-1.0,)


@pytest.fixture(scope="module")
def gearbox():
    return Gearbox(load()[0], "4,16")


@pytest.fixture
def written(gearbox, tokenizer):
    def write(prompts=PROMPTS, **keywords):
        return batch_generate(gearbox.model, tokenizer, prompts, **({"gearbox": gearbox, "max_tokens": 16} | keywords))

    return write


@pytest.fixture
def alone(gearbox, tokenizer):
    def write(prompt, max_tokens, **keywords):
        keywords = {"gearbox": gearbox} | keywords
        return list(stream_generate(gearbox.model, tokenizer, prompt, max_tokens, **keywords))

    return write


def until_the_end(generator, uids):
    """The responses of each sequence."""
    seen = []
    while responses := generator.next_generated():
        seen += responses
    return [[response for response in seen if response.uid == uid] for uid in uids]


@pytest.mark.slow
@pytest.mark.parametrize("gear", ["low", "high"])
def test_fixed_gear_outputs_and_traces_equal_single(written, alone, gear):
    batch = written(mode=Static(gear), max_tokens=ROOM, return_token_ids=True)
    for text, trace, tokens, prompt, room in zip(batch.texts, batch.traces, batch.token_ids, PROMPTS, ROOM):
        single = alone(prompt, room, mode=Static(gear))
        assert text == "".join(response.text for response in single)
        assert tokens == [response.token for response in single]
        for field in ("text", "token", "gear", "entropy", "mean_entropy", "shifted", "finish_reason", "prompt_tokens"):
            assert [getattr(each, field) for each in trace] == [getattr(each, field) for each in single], field


def test_seeded_outputs_leave_other_random_numbers(written):
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(5)
    written(mode=Static("low"), sampler=make_sampler(temp=1.0), seeds=[1, 2, 3, 4], max_tokens=4)
    assert mx.random.uniform(shape=(3,)).tolist() == expected


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("policy", "expected"), [("highest", {"high"}), ("most", {"low"}), ("quantile:0.6", {"low"}), (min, {"low"})]
)
def test_the_gear_of_a_step_is_the_policys(gearbox, tokenizer, policy, expected):
    """One of three sequences wants the top gear from its third token on."""
    generator = batch_generator(gearbox.model, tokenizer, mode="route", gearbox=gearbox, batch_policy=policy)
    modes = [Route(thresholds=each, min_gear_duration=1, initial_gear="low") for each in (NEVER, ALWAYS, NEVER)]
    uids = generator.insert([tokenizer.encode(prompt) for prompt in PROMPTS[:3]], [8, 8, 8], modes=modes)
    for place, text in enumerate(until_the_end(generator, uids)):
        assert [response.requested_gear for response in text] == ["low"] * 2 + (["high"] if place == 1 else ["low"]) * 6
        assert [response.gear for response in text][:2] == ["low", "low"]
        assert {response.gear for response in text[2:]} == expected


def test_the_sequences_of_a_pass_share_its_bytes(written, gearbox):
    batch = written(mode=Static("low"), max_tokens=ROOM)
    whole = {rows: gearbox.weight_bytes_per_token(gearbox.ladder.find("low"), rows) for rows in (1, 2, 3, 4)}
    assert {each.batch_size for trace in batch.traces for each in trace} >= {4, 1}
    for trace in batch.traces:
        assert {each.passes for each in trace} == {(1, 0)}
        assert all(each.weight_bytes == whole[each.batch_size] // each.batch_size for each in trace)


def test_joining_and_leaving_leave_other_outputs_unchanged(gearbox, tokenizer, alone):
    generator = batch_generator(gearbox.model, tokenizer, mode=Static("high"), gearbox=gearbox)
    tokens = [tokenizer.encode(prompt) for prompt in PROMPTS]
    first, leaver = generator.insert(tokens[:2], [24, 24])
    found = {first: []}
    for step in range(60):
        if step == 5:
            generator.remove([leaver])
        if step == 8:
            (late,) = generator.insert([tokens[2]], [12])
            found[late] = []
        for response in generator.next()[1]:
            assert response.uid in found or (response.uid == leaver and step < 5)
            found.setdefault(response.uid, []).append(response.token)
    assert found[first] == [each.token for each in alone(PROMPTS[0], 24, mode=Static("high"))]
    assert found[late] == [each.token for each in alone(PROMPTS[2], 12, mode=Static("high"))]
    assert generator.sequences == {}


def test_new_sequence_starts_in_its_first_gear(gearbox, tokenizer, alone):
    """In any gear of the others, so that its KV cache does not depend on them."""
    modes = [Route(thresholds=ALWAYS, initial_gear="high"), Route(thresholds=NEVER, initial_gear="low")]
    generator = batch_generator(gearbox.model, tokenizer, mode="route", gearbox=gearbox)
    tokens = [tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    uids = generator.insert(tokens, [12, 6], modes=modes)
    texts = until_the_end(generator, uids)
    gears = [[response.gear for response in text] for text in texts]
    assert gears[1][0] == "low"
    assert set(gears[0]) | set(gears[1][1:]) == {"high"}
    (first, *_) = alone(PROMPTS[1], 1, mode=Static("low"))
    assert texts[1][0].entropy == first.entropy  # the prompt was not read in the others' gear


def test_returned_cache_continues_generation(written, gearbox, tokenizer):
    keywords = {"mode": Static("high"), "return_prompt_caches": True, "return_token_ids": True}
    whole = written(PROMPTS[:1], max_tokens=12, **keywords)
    begun = written(PROMPTS[:1], max_tokens=6, **keywords)
    (cache,), (tokens,) = begun.caches, whole.token_ids
    assert cache[0].offset == len(tokenizer.encode(PROMPTS[0])) + 6
    assert written([tokens[6:7]], max_tokens=5, prompt_caches=[cache], **keywords).token_ids == [tokens[7:]]


def test_log_probabilities_match_tokens(written, alone):
    batch = written(mode=Static("high"), return_logprobs=True, max_tokens=5)
    for logprobs, prompt in zip(batch.logprobs, PROMPTS):
        assert logprobs == [each.logprobs[each.token].item() for each in alone(prompt, 5, mode=Static("high"))]


def test_batch_without_flags_returns_texts_only(written):
    batch = written(mode=Static("high"), max_tokens=2)
    assert (batch.caches, batch.token_ids, batch.logprobs) == (None, None, None)


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        *((name, Static("low")) for name in ("gemma3_text", "qwen3_moe", "mamba", "jamba")),
        *((name, Lossless(draft_length=3)) for name in ("gemma3_text", "qwen3_moe", "mamba2")),
    ],
    ids=str,
)
def test_other_caches_and_layers(architecture, mode, tokenizer):
    """Windows that slide, experts, states."""
    model = tiny_model(architecture)
    gearbox = Gearbox(model, "4,16")
    prompts = [[1, 5, 9, 2, 7], [3, 4], [8] * 9]
    batch = batch_generate(model, tokenizer, prompts, mode=mode, gearbox=gearbox, max_tokens=5, return_token_ids=True)
    for prompt, tokens in zip(prompts, batch.token_ids):
        single = stream_generate(model, tokenizer, prompt, 5, mode=mode, gearbox=gearbox)
        assert tokens == [response.token for response in single]


class TestBadInput:
    @pytest.mark.parametrize(
        ("keywords", "line"),
        [
            ({"prompts": []}, "prompts: must not be empty; pass one prompt or more"),
            ({"prompts": ["x", []], "max_tokens": 3}, "prompts[1]: must have tokens, got none; pass one token or more"),
            ({"prompts": ["x", [1] * 9999]}, "prompts[1]: must be below the context of "),
            *(({"max_tokens": w}, f"max_tokens[0]: must be 1 or more, got {w}; set") for w in (0, None, 1.5)),
            ({"max_tokens": [3, 3, -1, 3]}, "max_tokens[2]: must be 1 or more, got -1; set"),
            ({"max_tokens": [3]}, "max_tokens: must have one entry per prompt, got 1 for 4; pass all"),
            ({"seeds": [1, 2]}, "seeds: must have one entry per prompt, got 2 for 4"),
            ({"samplers": [None]}, "samplers: must have one entry per prompt, got 1 for 4"),
            ({"prompt_caches": []}, "caches: must have one entry per prompt, got 0 for 4"),
            ({"batch_policy": "mean"}, "batch policy: must be a known name, got 'mean'"),
            ({"mode": Kickdown()}, "mode 'kickdown': generates one sequence at a time"),
            ({"prompts": "Once"}, "prompts: must be a list, got one string; pass a list of strings"),
            ({"prompts": ["x", [7, 10**6]]}, "prompts[1]: tokens must be 0 to 4095, got 1000000; use"),
            ({"prompts": ["x", [-1]]}, "prompts[1]: tokens must be 0 to 4095, got -1"),
            ({"kv_gears": "4,16"}, "kv_gears: is not available in batches; omit it"),
            ({"kv_bits": 4}, "kv_bits: is not available in batches; omit it"),
            ({"colour": 1}, "batch: has no colour; choose from completion_batch_size, "),
            *(
                ({f"{of}_batch_size": 0}, f"{of}_batch_size: must be 1 or more, got 0; set")
                for of in ("prefill", "completion")
            ),
            ({"prefill_step_size": -2}, "prefill_step_size: must be 1 or more, got -2; set"),
            ({"max_kv_size": 8}, "max_kv_size: is not available in batches; omit it"),
            ({"batch_policy": 3}, "batch policy: must be a known name, got 3"),
            ({"mode": Route(), "batch_policy": lambda w: 2}, "batch policy: must return 0 to 1, got 2; use"),
            ({"seeds": [1, 2, 1.5, None]}, "seeds[2]: must be a whole number from 0, got 1.5; use"),
            (
                {"logits_processors": [None, 5, None, None]},
                "logits_processors[1]: must be functions, got 5; pass a list",
            ),
            (
                {"prompt_caches": [[KVCache()], *[None] * 3]},
                "prompt_caches[0]: must have 6 layers for this model, got 1",
            ),
            (
                {"prompt_caches": [[QuantizedKVCache()] * 6, *[None] * 3]},
                "prompt_caches[0]: sequences cannot share a QuantizedKVCache",
            ),
        ],
    )
    def test_error_names_value(self, written, keywords, line):
        with pytest.raises(GearbxError) as error:
            written(**keywords)
        assert str(error.value).startswith(line)
        assert "\n" not in str(error.value)

    def test_running_sequences_continue(self, gearbox, tokenizer, alone):
        generator = batch_generator(gearbox.model, tokenizer, mode=Static("high"), gearbox=gearbox)
        (uid,) = generator.insert([tokenizer.encode(PROMPTS[0])], [6])
        tokens = []
        while responses := generator.next_generated():
            with pytest.raises(GearbxError, match=r"prompts\[1\]: must have tokens"):
                generator.insert([[1, 2], []])
            tokens += [response.token for response in responses]
        assert tokens == [each.token for each in alone(PROMPTS[0], 6, mode=Static("high"))]
        assert uid not in generator.sequences

    @pytest.mark.parametrize("mode", [Static("high"), Lossless(lookup_tokens=0)], ids=lambda mode: mode.name)
    @pytest.mark.parametrize(
        ("whole", "broken", "words"),
        [(0, lambda logits: logits * float("nan"), "logits: not finite"), (3, lambda logits: 1 / 0, "by zero")],
    )
    def test_bad_row_ends_only_its_sequence(self, gearbox, tokenizer, alone, mode, whole, broken, words):
        tokens = [tokenizer.encode(prompt) for prompt in PROMPTS[:2]]

        def fails(before, logits):
            return logits if len(before) < len(tokens[1]) + whole else broken(logits)

        generator = batch_generator(gearbox.model, tokenizer, mode=mode, gearbox=gearbox)
        uids = generator.insert(tokens, [6, 6], logits_processors=[None, [fails]])
        good, bad = until_the_end(generator, uids)
        expected = alone(PROMPTS[0], 6, mode=Static("high"))
        assert [response.token for response in good] == [each.token for each in expected]
        assert [response.error for response in bad[:-1]] == [None] * whole
        assert words in str(bad[-1].error)


LENGTHS = [(1, 5), (2, 12), (9, 3), (30, 7), (270, 9), (3, 1), (17, 8), (40, 4)]  # tokens of prompts and texts
FORMATS, ACTIVATIONS = ("planes", "affine", "rowwise", "groupwise", "exact"), ("float", "int16")
MODELS = [("llama", {}), ("llama", {"attention_bias": True, "rope_traditional": True}), ("qwen3", {}), ("phi3", {})]


def boxed(architecture="llama", ladder="4,16", dtype=mx.float32, **how) -> Gearbox:
    change = how.pop("change", {})
    return Gearbox(tiny_model(architecture, dtype=dtype, **change), ladder, kernels="native", **how)


def prompt(length: int) -> list[int]:
    return [(7 * i * i + 3 * length) % 50 for i in range(length)]


def each_alone(model, length: int, count: int) -> list[tuple[int, mx.array]]:
    """Tokens and log-probabilities (V,) of a text alone."""
    found = [(int(token), row) for token, row in generate_step(mx.array(prompt(length)), model, max_tokens=count)]
    return found[:count]


def together(model, lengths, at_first: int, every: int = 2) -> list[list[tuple[int, mx.array]]]:
    """As `each_alone`, in one batch that begins with `at_first` sequences; one more joins every few steps."""
    generator = BatchGenerator(model, completion_batch_size=8, prefill_batch_size=3, prefill_step_size=64)
    texts, waiting, steps = [[] for _ in lengths], list(lengths), 0
    while waiting or sum(map(len, texts)) < sum(count for _, count in lengths):
        joining = waiting[:at_first] if steps == 0 else waiting[: steps % every == 0]
        if joining:
            waiting = waiting[len(joining) :]
            generator.insert([prompt(length) for length, _ in joining], max_tokens=[count for _, count in joining])
        for token in generator.next()[1]:
            texts[token.uid].append((token.token, token.logprobs))
        steps += 1
    generator.close()
    return texts


BATCHES = [
    *(({}, LENGTHS[-size:], size) for size in (1, 2, 5, 8)),  # which begin together
    *(({"ladder": bits, "dtype": dtype}, LENGTHS, 2) for bits in ("4,16", "16") for dtype in (mx.float32, mx.bfloat16)),
    *(({"architecture": name, "change": change}, LENGTHS[:4], 3) for name, change in MODELS),
    *(({"format": f, "activations": a, "dtype": mx.bfloat16}, LENGTHS[:4], 3) for f in FORMATS for a in ACTIVATIONS),
]


@pytest.mark.usefixtures("native")
@MANY_VECTORS
@pytest.mark.parametrize(("how", "lengths", "at_first"), BATCHES, ids=str)
def test_joining_and_leaving_outputs_equal_single_sequences(how, lengths, at_first):
    box = boxed(**how)
    for gear in box.ladder:
        box.shift(gear)
        for text, (length, count) in zip(together(box.model, lengths, at_first), lengths, strict=True):
            expected = each_alone(box.model, length, count)
            assert [token for token, _ in text] == [token for token, _ in expected]
            assert all(mx.array_equal(row, other).item() for (_, row), (_, other) in zip(text, expected, strict=True))


@pytest.mark.usefixtures("native")
@MANY_VECTORS
def test_blocks_of_a_batch_run_as_one_operation(monkeypatch):
    box, whole = boxed(), []
    native = block.cpu_kernels(1)
    cache = [BatchKVCache.merge([KVCache(), KVCache()]) for _ in box.model.layers]
    run = native.run_blocks
    monkeypatch.setattr(native, "run_blocks", lambda *args: whole.append(args[1].shape) or run(*args))
    for tokens in (mx.concatenate([PROMPT, PROMPT]), mx.array([[1], [2]]), normal(2, 12) > 0):
        box.model(tokens.astype(mx.int32), cache=cache)
    assert [shape[:2] for shape in whole] == [(2, 1), (2, 12)]
