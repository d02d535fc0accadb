import json
import time

import jsonschema
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from schemas import CHOICE, PERSON, PROMPT, TOO_MUCH, format_of
from transformers import AutoTokenizer

from gearbx_mlx import GearbxError, Lossless, stream_generate
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.server.grammar import MAX_SCHEMA_BYTES, ResponseFormat, allow, constraint_for, mask_of

END = 0  # the demo model's end of text


def written(model, tokenizer, schema, **keywords):
    """The responses of a text under a schema, and its constraint."""
    constraint = constraint_for(tokenizer, format_of(schema))
    keywords = {"prompt": PROMPT, "max_tokens": 90, "logits_processors": [constraint]} | keywords
    return list(stream_generate(model, tokenizer, **keywords)), constraint


def check(responses, schema):
    assert responses[-1].finish_reason == "stop"
    answer = json.loads("".join(response.text for response in responses))
    jsonschema.validate(answer, schema)
    return answer


@pytest.mark.some(2)
@pytest.mark.parametrize("schema", [PERSON, CHOICE], ids=["object", "choice"])
@pytest.mark.parametrize("mode", ["static", "route", "kickdown", "lossless"])
def test_an_answer_fits_its_schema(demo, geared_demo, mode, schema):
    responses, constraint = written(demo.model, demo.tokenizer, schema, mode=mode, gearbox=geared_demo, max_tokens=200)
    check(responses, schema)
    assert constraint.error is None


@pytest.mark.some(1)
@pytest.mark.parametrize("mode", [Lossless(draft_length=4), Lossless(lookup_tokens=15)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_lossless_answer_is_the_top_gears(demo, geared_demo, mode, temperature):
    runs, how = [], {"gearbox": geared_demo, "sampler": make_sampler(temperature), "max_tokens": 120}
    for each in ("static", mode):
        geared_demo.shift("high")
        mx.random.seed(7)
        runs.append(written(demo.model, demo.tokenizer, PERSON, mode=each, **how)[0])
    static, lossless = runs
    assert [r.token for r in static] == [r.token for r in lossless]
    check(lossless, PERSON)
    assert sum(r.drafted + r.lookup_drafted for r in lossless) > 0
    assert any(r.source != "model" for r in lossless)


def test_outputs_of_batch_have_separate_schemas(demo):
    """mlx-lm's server does so: the cache has all tokens of the second prompt but two."""
    schemas, prompts = [PERSON, CHOICE], [demo.tokenizer.encode(PROMPT), demo.tokenizer.encode("Is it?")]
    caches = [mlx_lm.models.cache.make_prompt_cache(demo.model) for _ in prompts]
    demo.model(mx.array([prompts[1][:-2]]), cache=caches[1])
    generator = BatchGenerator(demo.model, stop_tokens=[[END]], max_tokens=90)
    how = {"caches": caches, "all_tokens": [[], prompts[1][:-2]]}
    how["logits_processors"] = [[constraint_for(demo.tokenizer, format_of(schema))] for schema in schemas]
    uids = generator.insert([prompts[0], prompts[1][-2:]], **how)
    tokens = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    for uid, schema in zip(uids, schemas):
        assert tokens[uid].pop() == END
        jsonschema.validate(json.loads(demo.tokenizer.decode(tokens[uid])), schema)


def test_any_json_object(demo):
    constraint = constraint_for(demo.tokenizer, ResponseFormat("json_object"))
    assert allowed(demo, constraint, "") == {"{"}
    assert "}" in allowed(demo, constraint, '{"a": [1, true]')


def allowed(demo, constraint, text, prompt=(5, 6)):
    """The texts of the tokens that may follow a text, with None for the end."""
    tokens = [*prompt, *demo.tokenizer.encode(text, add_special_tokens=False)]
    constraint(mx.array(prompt), mx.zeros((1, 4096)))
    left = constraint(mx.array(tokens), mx.zeros((1, 4096)))
    return {demo.tokenizer.decode([t]) if t != END else None for t in np.flatnonzero(np.isfinite(np.array(left[0])))}


def test_output_may_end_when_grammar_is_complete(demo):
    constraint = constraint_for(demo.tokenizer, format_of({"type": "integer", "maximum": 12, "minimum": 0}))
    assert None not in allowed(demo, constraint, "")
    assert allowed(demo, constraint, "1") == {None, "0", "1", "2"}
    assert allowed(demo, constraint, "12") == {None}


def test_allowed_tokens_depend_only_on_tokens(demo):
    """Calls in any order, as when drafts are dropped or texts continue from another place."""
    random = np.random.default_rng(3)
    texts = '{"name": "Tom", "age": 8, "likes": ["tea"]}', '{"name": "Tim", "age": 81,', '{ "name":\n"', '{"name": "\\"'
    texts = [demo.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    constraint = constraint_for(demo.tokenizer, format_of(PERSON))
    constraint(mx.array([9]), mx.zeros((1, 4096)))
    for _ in range(60):
        text = texts[random.integers(len(texts))]
        text = text[: random.integers(len(text) + 1)] + [END] * int(random.integers(3) == 0)
        fresh = constraint_for(demo.tokenizer, format_of(PERSON))
        fresh(mx.array([9]), mx.zeros((1, 4096)))
        ours, theirs = (each(mx.array([9, *text]), mx.zeros((1, 4096))) for each in (constraint, fresh))
        assert mx.array_equal(ours, theirs).item()


def test_disallowed_token_ends_output_and_is_reversible(demo):
    constraint = constraint_for(demo.tokenizer, format_of(PERSON))
    assert allowed(demo, constraint, '{"name": "Tom", "age": 8, "likes": [] and') == {None}
    assert "different logits processor" in constraint.error
    fresh = constraint_for(demo.tokenizer, format_of(PERSON))
    assert allowed(demo, constraint, '{"name": "Tom"') == allowed(demo, fresh, '{"name": "Tom"')


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("size", [1, 20, 24, 31, 40])
def test_logits_of_other_tokens_are_minus_infinity(dtype, size):
    """Vocabularies are padded: there may be fewer or more logits than bits in the mask."""
    logits = mx.random.normal((1, size), key=mx.random.key(1)).astype(dtype)
    left = allow(logits, mask_of([0, 7, 8, 19, 23], 24))
    assert left.dtype == dtype
    kept = [token in (0, 7, 8, 19, 23) for token in range(size)]
    assert mx.array_equal(left, mx.where(mx.array([kept]), logits, -mx.inf)).item()


@pytest.mark.parametrize("opened", [True, False])
def test_grammar_starts_after_thinking_part(demo, opened):
    """The tokenizer's vocabulary is larger than the logits of the demo model here, since vocabularies are padded."""
    tokens = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokens.add_tokens(["<think>", "</think>"])
    tokenizer = TokenizerWrapper(tokens)
    prompt, word = tokenizer.encode("So"), tokenizer.encode(" why", add_special_tokens=False)

    def left(constraint, *said):
        logits = constraint(mx.array([*prompt, *said]), mx.zeros((1, 4100)))
        return set(np.flatnonzero(np.isfinite(np.array(logits[0]))).tolist())

    start, end = tokenizer.think_start_id, tokenizer.think_end_id
    thought = [*word, *word] if opened else [start, *word, *word]
    grammar = left(constraint_for(demo.tokenizer, format_of(CHOICE)))
    constraint = constraint_for(tokenizer, format_of(CHOICE), thinking=opened)
    everything = set(range(len(tokens))) - {END}
    assert left(constraint) == (everything if opened else grammar | {start})
    assert left(constraint, *thought) == everything
    assert left(constraint, *thought, end) == grammar
    assert not {END, *word, start} & grammar


def test_slow_grammar_ends_output(demo):
    responses, constraint = written(demo.model, demo.tokenizer, TOO_MUCH, mode="telemetry-only")
    assert responses[-1].finish_reason == "stop"
    assert constraint.error.startswith("response_format: the answer cannot be finished (")
    assert "\n" not in constraint.error


DEEP = {"type": "integer"}
for _ in range(70):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"type": "integer", "minimum": 7, "maximum": 3}, "Unsatisfiable"),
        ({"$ref": "http://example.com/schema"}, "does not fetch"),
        ({"$ref": "#"}, "no grammar"),
        ({"not": {"type": "object"}}, "Unimplemented"),
        (DEEP, "64 levels deep"),
        ({"enum": ["x" * MAX_SCHEMA_BYTES]}, f"at most {MAX_SCHEMA_BYTES}"),
    ],
)
def test_unsupported_schema_is_refused(demo, schema, said):
    start = time.perf_counter()
    with pytest.raises(GearbxError, match="response_format") as error:
        constraint_for(demo.tokenizer, format_of(schema))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert time.perf_counter() - start < 2
