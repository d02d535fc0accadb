"""Draft steps queued before the entropies are read: the text is the same, and all steps are counted."""

import copy
import itertools
import json

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from conftest import PROMPT, tiny_model
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler

import gearbx_mlx
from gearbx_mlx import Gearbox, Lossless, stream_generate
from gearbx_mlx.decoding import lossless
from gearbx_mlx.decoding.draft_plans import DraftPlan
from gearbx_mlx.decoding.drafting import Drafter, Writer
from gearbx_mlx.decoding.lossless import LosslessModel
from gearbx_mlx.decoding.sampling import MLX_READER, Chooser
from gearbx_mlx.routing.acceptance import MOST_DRAFTED, FixedLength
from gearbx_mlx.routing.rounds import Costs, Rounds

TALE = "Once upon a time there was a king who"
SOME = (1, 4, MOST_DRAFTED)
SAMPLERS = {"greedy": None, "sampled": make_sampler(0.8, top_p=0.9), "ours": gearbx_mlx.make_sampler(0.8)}
PROCESSORS = {"plain": (), "repetition": tuple(make_logits_processors(repetition_penalty=1.3))}
LENGTHS = (1, 5, 2, 9, 3)


@pytest.fixture(params=["mlx", "native"])
def kernels(request) -> str:
    """The kernels available here."""
    if request.param == "native":
        request.getfixturevalue("compiled")
    return request.param


class InTurn:
    """Drafts of the lengths in LENGTHS, one after the other, for any entropies."""

    def __init__(self):
        self._lengths = itertools.cycle(LENGTHS)

    def begin(self):
        self._left = next(self._lengths)

    def goes_on(self, entropy):
        self._left -= 1
        return self._left > 0


class After:
    """A rule that ends every draft after so many tokens; a drafter cannot know that before."""

    def __init__(self, tokens):
        self._tokens = tokens

    def begin(self):
        self._left = self._tokens

    def goes_on(self, entropy):
        self._left -= 1
        return self._left > 0


def written(model, prompt=PROMPT[0], seed=5, **keywords):
    """Tokens and log-probabilities of mlx-lm's loop, and the random state afterwards."""
    mx.random.seed(seed)
    made = [(token, np.array(logprobs)) for token, logprobs in generate_step(prompt, model, max_tokens=24, **keywords)]
    return made, mx.random.state[0].tolist()


def assert_same(ours, theirs):
    assert [token for token, _ in ours[0]] == [token for token, _ in theirs[0]]
    assert all(np.array_equal(mine, other) for (_, mine), (_, other) in zip(ours[0], theirs[0], strict=True))
    assert ours[1] == theirs[1]


class TestTheTextIsTheTopGears:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("processors", PROCESSORS)
    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_with_samplers_and_processors(self, kernels, sampler, processors):
        model = tiny_model()
        gearbox = Gearbox(model, "6,16", kernels=kernels)
        given = {"sampler": SAMPLERS[sampler], "logits_processors": PROCESSORS[processors]}
        theirs = written(model, **given)
        for depth in SOME:
            model_of_rounds = LosslessModel(gearbox, InTurn(), prompt_tokens=5, draft_ahead=depth, **given)
            assert_same(written(model_of_rounds, **given), theirs)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("architecture", ["gemma3_text", "mamba", "lfm2", "mixtral"])
    @pytest.mark.parametrize("prompt", [PROMPT[0], mx.arange(70)], ids=["short", "longer than the window"])
    def test_with_windows_states_and_experts(self, architecture, prompt):
        model = tiny_model(architecture)
        gearbox = Gearbox(model, "6,16")
        made, _ = written(model, prompt)
        for depth in (2, MOST_DRAFTED):
            model_of_rounds = LosslessModel(gearbox, InTurn(), draft_ahead=depth)
            assert [token for token, _ in written(model_of_rounds, prompt)[0]] == [token for token, _ in made]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "keywords",
        [
            {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
            {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 12},
            {"prompt_cache": lambda layers: [RotatingKVCache(8, 4) for _ in layers]},
        ],
        ids=["quantized", "quantized on the way", "rotating"],
    )
    def test_with_other_caches(self, tiny, kernels, keywords):
        def fresh():
            return {name: value(tiny.layers) if callable(value) else value for name, value in keywords.items()}

        gearbox = Gearbox(tiny, "6,16", kernels=kernels)
        made, _ = written(tiny, **fresh())
        for depth in (2, MOST_DRAFTED):
            model_of_rounds = LosslessModel(gearbox, InTurn(), draft_ahead=depth)
            assert [token for token, _ in written(model_of_rounds, **fresh())[0]] == [token for token, _ in made]

    @pytest.mark.some(2)
    @pytest.mark.parametrize(("max_tokens", "stops"), [(1, False), (2, False), (7, False), (24, True)])
    def test_wherever_it_ends(self, geared_demo, demo, max_tokens, stops, monkeypatch):
        tokenizer = copy.deepcopy(demo.tokenizer)
        geared_demo.shift("high")
        if stops:
            made = [r.token for r in mlx_lm.stream_generate(demo.model, tokenizer, TALE, max_tokens)]
            tokenizer.eos_token_ids = {made[17]}
        geared_demo.shift("high")
        theirs = [
            (r.token, r.text, r.finish_reason) for r in mlx_lm.stream_generate(demo.model, tokenizer, TALE, max_tokens)
        ]
        for depth in (1, 4):
            monkeypatch.setattr(lossless, "steps_ahead", lambda depth=depth: depth)
            mode = Lossless(rule=After(6))
            ours = list(stream_generate(demo.model, tokenizer, TALE, max_tokens, gearbox=geared_demo, mode=mode))
            assert [(r.token, r.text, r.finish_reason) for r in ours] == theirs
        assert theirs[-1][2] == ("stop" if stops else "length")

    def test_a_cache_has_nothing_of_what_was_thrown_away(self, tiny):
        gearbox = Gearbox(tiny, "6,16")
        caches = [make_prompt_cache(tiny) for _ in range(2)]
        written(tiny, prompt_cache=caches[0])
        written(LosslessModel(gearbox, InTurn(), draft_ahead=4), prompt_cache=caches[1])
        for mine, other in zip(*caches, strict=True):
            assert mine.offset == other.offset
            assert all(mx.array_equal(a, b) for a, b in zip(mine.keys_and_values(), other.keys_and_values()))


class TestDrafts:
    @staticmethod
    def begun(gearbox):
        gearbox.shift("high")
        cache = make_prompt_cache(gearbox.model)
        gearbox.model(PROMPT[:, :-1], cache=cache)
        return cache

    def drafts(self, gearbox, rule, most=12, depths=(0, *SOME), stop_tokens=frozenset(), **settings):
        """For each depth: the text after the prompt with its drafts, and how many steps were thrown away."""
        low, found = gearbox.ladder[0], {}
        for depth in depths:
            mx.random.seed(7)
            text = Writer(Chooser(**settings), PROMPT[0, -1].item(), 99, stop_tokens.__contains__, PROMPT[0].tolist())
            drafter = Drafter(gearbox, low, MLX_READER, depth)
            done = drafter.draft(text, self.begun(gearbox), rule, most)
            found[depth] = text, done
            assert mx.random.state[0].tolist() == mx.random.key(7).tolist()
        return found

    @pytest.mark.some(2)
    @pytest.mark.parametrize("processors", PROCESSORS)
    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_are_the_same_at_every_depth(self, tiny, sampler, processors):
        settings = {"sampler": SAMPLERS[sampler] or greedy_sampler, "processors": PROCESSORS[processors]}
        found = self.drafts(Gearbox(tiny, "6,16"), After(5), **settings)
        first = found[0][0]
        assert len(first.tokens) == 5
        for depth, (text, done) in found.items():
            assert (text.tokens, text.entropies) == (first.tokens, first.entropies)
            assert (done.steps, done.discarded) == (5, min(depth, 12 - 5))

    def test_nothing_is_thrown_away_beyond_an_end_that_is_known(self, tiny):
        gearbox = Gearbox(tiny, "6,16")
        for rule, most, length in ((FixedLength(5), 12, 5), (After(9), 4, 4)):
            found = self.drafts(gearbox, rule, most)
            assert {(len(text.tokens), done.discarded) for text, done in found.values()} == {(length, 0)}

    def test_end_at_a_stop_token(self, tiny):
        gearbox = Gearbox(tiny, "6,16")
        whole = self.drafts(gearbox, After(9), depths=(0,))[0][0].tokens
        place = next(place for place, token in enumerate(whole[1:], 1) if token not in whole[:place])
        found = self.drafts(gearbox, After(9), stop_tokens=frozenset({whole[place]}))
        for depth, (text, done) in found.items():
            assert text.tokens == whole[: place + 1]
            assert done.discarded == min(depth, 12 - place - 1)

    def test_processors_see_the_tokens_before_each_place(self, tiny):
        seen = []

        def processor(tokens, logits):
            seen.append(tokens)
            return logits

        draft, _ = self.drafts(Gearbox(tiny, "6,16"), After(4), depths=(2,), processors=(processor,))[2]
        text = PROMPT[0].tolist()
        assert [tokens.tolist() for tokens in seen[:5]] == [text + draft.tokens[:place] for place in range(5)]
        assert len(seen) == 6


class TestWhatIsCounted:
    @pytest.mark.parametrize("depth", [0, 1, 4])
    def test_passes_and_bytes_are_of_all_steps(self, geared_demo, demo, depth, monkeypatch):
        monkeypatch.setattr(lossless, "steps_ahead", lambda: depth)
        mode = Lossless(rule=After(4))
        responses = list(stream_generate(demo.model, demo.tokenizer, TALE, 24, gearbox=geared_demo, mode=mode))
        low, high = (geared_demo.weight_bytes_per_token(gear) for gear in geared_demo.ladder)
        drafted, discarded = sum(r.drafted for r in responses), sum(r.discarded for r in responses)
        passes = [sum(counts) for counts in zip(*(r.passes for r in responses))]
        assert passes[0] == drafted + discarded
        assert sum(r.weight_bytes for r in responses) == passes[0] * low + passes[1] * high
        assert max(r.discarded for r in responses) == depth
        assert all(r.drafted <= 4 for r in responses)

    def test_steps_thrown_away_are_costs_of_drafts(self):
        costs = Costs(lambda: 0.25, lambda rows: 1.0)
        spent = []
        for discarded in (0, 2):
            rounds = Rounds(costs)
            for _ in range(500):
                rounds.note_drafts(4, 5, discarded)
            spent.append(rounds.with_drafts())
        assert spent[0] < spent[1]
        assert spent[1] - spent[0] == pytest.approx(2 * 0.25 / 5, rel=0.2)  # both lean to the top gear alone

    def test_summary_and_trace(self, command, tmp_path, monkeypatch):
        monkeypatch.setattr(lossless, "steps_ahead", lambda: 2)
        monkeypatch.setattr(
            lossless,
            "plan_of",
            lambda gearbox, *_: DraftPlan(After(3), Rounds(Costs(lambda: 0.2, lambda rows: 1.0), 0)),
        )
        summary, trace = tmp_path / "s.json", tmp_path / "t.jsonl"
        flags = ("--mode", "lossless", "-m", 16, "--prompt", TALE, "--ignore-chat-template")
        done = command("generate", *flags, "--summary", summary, "--trace", trace)
        assert done.status == 0
        counted = json.loads(summary.read_text())
        rows = [json.loads(line) for line in trace.read_text().splitlines()]
        assert counted["discarded"] == sum(row["discarded"] for row in rows) > 0
        assert counted["passes"]["low"] == counted["drafted"] + counted["discarded"]
        assert f"{counted['discarded']} steps thrown away" in done.err.replace("\n", " ")
