"""Drafters: what they propose, that they leave no trace, and another model in the low gear's place."""

import itertools
from typing import ClassVar

import mlx.core as mx
import numpy as np
import pytest
from conftest import PROMPT, tiny_model
from lossless_texts import assert_written, endless, written
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler
from stand_in_device import Speeds, StandIn

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxWarning, Lossless, stream_generate
from gearbx_mlx.compat.classes import modules_of
from gearbx_mlx.decoding import drafters
from gearbx_mlx.decoding.drafters import DRAFTERS, Drafter, DraftTarget, built_ahead, low_gear
from gearbx_mlx.decoding.drafters.low_gear import LowGear, draft_cost
from gearbx_mlx.decoding.policy import FixedPolicy, LearnedPolicy
from gearbx_mlx.decoding.response import DRAFT, GeneratedText
from gearbx_mlx.decoding.rows import Proposal
from gearbx_mlx.decoding.sampling import GREEDY, Chooser, reader_of
from gearbx_mlx.formats.native import Native, rounded_to
from gearbx_mlx.ranks.agreement import Agreement

SAMPLERS = {"greedy": greedy_sampler, "sampled": make_sampler(0.8, top_p=0.9), "ours": gearbx_mlx.make_sampler(0.8)}
PROCESSORS = {"plain": (), "repetition": tuple(make_logits_processors(repetition_penalty=1.3))}
TOKENS = PROMPT[0].tolist()


@pytest.fixture(params=["mlx", "native"])
def kernels(request) -> str:
    """The kernels available here."""
    if request.param == "native":
        request.getfixturevalue("compiled")
    return request.param


def native_box():
    """A gearbox whose low gear drafts natively, token by token."""
    return Gearbox(tiny_model(dtype=mx.bfloat16), "4,16", kernels="native")


def drafted(gearbox, most, goes_on=lambda margins: True, ends=frozenset(), settings=None, **choosing):
    """What the low gear proposes after the prompt; it leaves neither its entries nor its random numbers behind."""
    gearbox.make(gearbox.ladder[0])
    cache = make_prompt_cache(gearbox.model)
    target = DraftTarget(gearbox, cache, Chooser(**choosing), reader_of(gearbox), **(settings or {}))
    drafter = LowGear(target, gearbox.ladder[0])
    gearbox.shift("high")
    mx.eval(gearbox.model(PROMPT[:, :-1], cache=cache))
    mx.random.seed(7)
    policy = FixedPolicy()
    policy.goes_on = goes_on
    proposal = drafter.propose(GeneratedText(list(TOKENS), ends), most, policy)
    assert mx.random.state[0].tolist() == mx.random.key(7).tolist()
    assert {part.offset for part in cache} == {len(TOKENS) - 1}
    return proposal


class TestLowGear:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("processors", PROCESSORS)
    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_drafts_equal_its_output_with_same_seed(self, kernels, sampler, processors):
        # Native drafts quantize activations to 8 bits, whatever the gear's own passes do.
        activations = {"mlx": "int16", "native": "int8"}[kernels]
        gearbox = Gearbox(tiny_model(), "6,16", kernels=kernels, activations=activations)
        given = {"sampler": SAMPLERS[sampler], "processors": PROCESSORS[processors]}
        proposal = drafted(gearbox, 6, **given)
        gearbox.shift("low")
        mx.random.seed(7)
        how = {"sampler": given["sampler"], "logits_processors": given["processors"]}
        how |= {"mode": gearbx_mlx.Static("low"), "gearbox": gearbox}
        run = stream_generate(gearbox.model, endless(), TOKENS, 6, **how)
        assert np.array(proposal.tokens).tolist() == [r.token for r in run]
        assert len(proposal) == 6
        assert proposal.weight_bytes == gearbox.weight_bytes_per_token(gearbox.ladder[0])

    def test_margins_are_the_same_natively_and_by_mlx(self, compiled, monkeypatch):
        monkeypatch.setattr(low_gear, "ACTIVATION_BITS", 16)  # MLX's graph does not quantize them
        of_ranks = {"agreement": Agreement()}  # which draft by MLX's graph
        margins = [np.array(drafted(native_box(), 5, settings=each).margins) for each in ({}, of_ranks)]
        assert margins[0] == pytest.approx(margins[1], abs=1e-2)
        assert (margins[0] > 0).all()

    def test_sampler_hiding_margins_has_none(self, kernels):
        gearbox = Gearbox(tiny_model(), "6,16", kernels=kernels)
        proposal = drafted(gearbox, 5, goes_on=lambda margins: False, sampler=SAMPLERS["sampled"])
        assert proposal.margins is None
        assert len(proposal) == 5  # nothing ends a draft early

    def test_known_margin_ends_draft_at_once(self, compiled):
        gearbox, asked = native_box(), []

        def goes_on(margins):
            asked.append(len(margins))
            return len(margins) < 3

        proposal = drafted(gearbox, 9, goes_on)
        assert len(proposal) == 3
        assert asked == [1, 2, 3]

    def test_a_native_draft_ends_at_a_stop_token(self, compiled):
        gearbox = native_box()
        whole = drafted(gearbox, 9).tokens
        place = next(place for place, token in enumerate(whole) if place and token not in whole[:place])
        assert drafted(gearbox, 9, ends=frozenset({whole[place]})).tokens == whole[: place + 1]


@pytest.mark.usefixtures("compiled")
def test_drafts_quantize_activations_to_8_bits():
    box, tokens = Gearbox(tiny_model(dtype=mx.bfloat16), "4,16", kernels="native", activations="int16"), PROMPT
    box.shift("low")
    low = [layer for layer in modules_of(box.model) if isinstance(layer, Native)]
    assert any(layer.x_bits == 16 for layer in low)
    before, bits = box.model(tokens), {id(layer): layer.x_bits for layer in low}
    drafted(box, 4)
    box.shift("low")
    assert mx.array_equal(box.model(tokens), before)
    assert {id(layer): layer.x_bits for layer in low} == bits
    with rounded_to(8, box.model):
        assert {layer.x_bits for layer in modules_of(box.model) if isinstance(layer, Native)} <= {0, 8}
        assert not mx.array_equal(box.model(tokens), before)


class TestDraftModel:
    """A draft model with a KV cache of its own; the text is the same as without."""

    @pytest.mark.some(2)
    @pytest.mark.parametrize("processors", PROCESSORS)
    @pytest.mark.parametrize("sampler", SAMPLERS)
    @pytest.mark.parametrize("seed", [0, 1])  # the same model, and one that agrees by chance
    def test_output_equals_plain_decoding(self, seed, sampler, processors):
        gearbox, given = Gearbox(tiny_model(), "16"), {"logits_processors": PROCESSORS[processors]}
        given["sampler"] = SAMPLERS[sampler]
        theirs = written(gearbox, TOKENS, 30, **given)
        for mode in (Lossless(draft_length=4), Lossless(draft_length=1), Lossless()):
            ours = written(gearbox, TOKENS, 30, mode, draft_model=tiny_model(seed=seed), **given)
            assert_written(ours, theirs)

    @pytest.mark.parametrize(("seed", "accepted"), [(0, (20, 24)), (1, (0, 12))])
    def test_drafts_are_counted_with_their_bytes(self, seed, accepted):
        gearbox, other = Gearbox(tiny_model(), "16"), tiny_model(seed=seed)
        mode = Lossless(draft_length=3, lookup_tokens=0)
        run = stream_generate(gearbox.model, endless(), TOKENS, 30, gearbox=gearbox, mode=mode, draft_model=other)
        responses = list(run)
        assert accepted[0] <= sum(r.from_draft for r in responses) <= accepted[1]
        drafted, passes = sum(r.drafted for r in responses), sum(r.passes[0] for r in responses)
        one, two = (gearbox.weight_bytes_per_token(gearbox.ladder.top, rows) for rows in (1, 2))
        assert sum(r.weight_bytes for r in responses) == drafted * (one + two - one) + passes * one
        assert run.summary()["draft_model"]["passes"] == drafted

    def test_untrimmable_cache_disables_drafts(self):
        gearbox = Gearbox(tiny_model(), "16")
        theirs = written(gearbox, TOKENS, 20)
        with pytest.warns(GearbxWarning, match=r"a state instead of entries.*drafting is disabled") as said:
            ours = written(gearbox, TOKENS, 20, Lossless(), draft_model=tiny_model("mamba"))
        assert len(said) == 1
        assert_written(ours, theirs)

    @pytest.mark.filterwarnings("ignore:.*drafting is disabled")
    def test_low_gear_does_not_replace_draft_model(self):
        gearbox = Gearbox(tiny_model(), "4,16")
        run = stream_generate(gearbox.model, endless(), TOKENS, 8, gearbox=gearbox, draft_model=tiny_model("mamba"))
        assert not any(response.drafted for response in run)


class Parrot(Drafter):
    """A toy: the text goes on as it has gone on after its last token before, else with this token again."""

    name, cost = "a parrot", 0.1
    calls: ClassVar[list] = []

    @classmethod
    def of(cls, target):
        return cls()

    def prefill(self, tokens, hidden):
        self.calls.append(("prefill", tokens.tolist()))

    def length(self, text, room, policy):
        return policy.length(min(room, 4))

    def propose(self, text, length, policy):
        following = dict(zip(text.tokens, text.tokens[1:]))
        tokens = [following.get(text.last, text.last)]
        while len(tokens) < length:
            tokens.append(following.get(tokens[-1], tokens[-1]))
        return Proposal(tokens, source=DRAFT)

    def update(self, text, found):
        self.calls.append(("update", len(text.tokens), None if found is None else found.logits.shape))


@pytest.mark.parametrize("gears", ["16", "4,16"])
def test_new_drafter_needs_class_and_registry_line(kernels, gears, monkeypatch):
    monkeypatch.setattr(Parrot, "calls", [])
    monkeypatch.setattr(drafters, "DRAFTERS", {"parrot": f"{__name__}:Parrot", **DRAFTERS})
    gearbox = Gearbox(tiny_model(), gears, kernels=kernels)
    run = stream_generate(gearbox.model, endless(), TOKENS, 30, gearbox=gearbox, mode=Lossless(draft_length=3))
    responses = list(run)
    theirs, _ = written(gearbox, TOKENS, 30)
    assert [r.token for r in responses] == [token for token, _ in theirs]
    assert {r.drafted for r in responses[1:]} <= {0, 1, 2, 3}
    assert max(r.drafted for r in responses) == 3
    assert any(r.from_draft for r in responses)
    assert Parrot.calls[0] == ("prefill", TOKENS[:-1])
    updates = [call for call in Parrot.calls if call[0] == "update"]
    assert updates[0] == ("update", len(TOKENS) + 1, (1, 1, 128))
    assert len(TOKENS) + 26 < updates[-1][1] <= len(TOKENS) + 30


@pytest.mark.parametrize("slow", ["Parrot", "LowGear"])
def test_sequence_drafts_with_the_faster_drafter(slow, monkeypatch):
    monkeypatch.setattr(drafters, "DRAFTERS", {"parrot": f"{__name__}:Parrot", **DRAFTERS})
    gearbox = Gearbox(tiny_model(), "4,16")
    target = drafters.DraftTarget(gearbox, [], GREEDY, is_fixed=True)
    used = drafters.drafters_for(target, lambda drafter: 1.0 if type(drafter).__name__ == slow else 0.5)
    assert [type(drafter).__name__ for drafter in used] == [{"Parrot": "LowGear", "LowGear": "Parrot"}[slow]]


def test_slow_drafts_cost_more_than_new_ones():
    slow, new = LearnedPolicy(draft_share=0.1), LearnedPolicy(draft_share=0.4)
    assert slow.token_cost < new.token_cost < LearnedPolicy(draft_share=0.1, acceptance=0.5).token_cost < 1
    for _ in range(60):
        slow.add_round(drafted=3, accepted=0, tokens=1, rows=4, seconds=0.02)
    assert slow.token_cost > 1 > new.token_cost


SLOW = Speeds(layers=2, plain=1e4, draft=1e4, two=1e4, row=0)  # milliseconds: Python is always ahead


def on_device(gearbox, mode, count=30):
    """A stand-in device, and each response after it was handed out."""
    with StandIn(gearbox, SLOW, unit=1.0).running() as device:
        for response in stream_generate(gearbox.model, endless(), TOKENS, count, gearbox=gearbox, mode=mode):
            yield device, response


def test_device_drafts_while_reader_takes_tokens():
    gearbox = Gearbox(tiny_model(), "4,16", kernels="mlx")
    run = on_device(gearbox, Lossless(draft_length=3, lookup_tokens=0))
    busy = [(device.is_busy, r.passes[-1]) for device, r in run]
    last = max(place for place, (_, passes) in enumerate(busy) if passes)  # nothing follows the last round
    assert all(is_busy for is_busy, _ in busy[:last])


def test_device_is_read_once_a_round():
    gearbox = Gearbox(tiny_model(), "4,16", kernels="mlx")
    found = list(on_device(gearbox, Lossless(draft_length=3, lookup_tokens=0)))
    device = found[0][0]
    assert device.reads == sum(r.passes[-1] for _, r in found)
    assert device.passes == sum(sum(r.passes) for _, r in found)


def test_device_computes_next_token_during_read():
    gearbox = Gearbox(tiny_model(), "16", kernels="mlx")
    passes = [device.passes for device, _ in on_device(gearbox, Lossless(lookup_tokens=0))]
    # After the first token one pass runs ahead, until the last token but one is handed out.
    assert [after - before for before, after in itertools.pairwise(passes)] == [2, *[1] * 27, 0]


@pytest.mark.some(4)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("length", [1, 3, 7])  # of 7, no graph is built in advance
def test_drafts_built_ahead_leave_output_unchanged(monkeypatch, length, sampler):
    gearbox, found, built = Gearbox(tiny_model(), "4,16", kernels="mlx"), [], []
    tokenizer = endless()  # loading one draws random numbers
    take = built_ahead.BuiltAhead.take
    monkeypatch.setattr(built_ahead.BuiltAhead, "take", lambda graphs: built.append(take(graphs)) or built[-1])
    monkeypatch.setattr(built_ahead.Pace, "verified", lambda pace: setattr(pace, "graphs", 5))
    for rows in (built_ahead.MAX_BUILT, 0):
        monkeypatch.setattr(built_ahead, "MAX_BUILT", rows)
        mx.random.seed(3)
        cache, mode = make_prompt_cache(gearbox.model), Lossless(draft_length=length, lookup_tokens=0)
        how = {"prompt_cache": cache, "sampler": SAMPLERS[sampler], "gearbox": gearbox, "mode": mode}
        run = stream_generate(gearbox.model, tokenizer, TOKENS, 40, **how)
        tokens = [(r.token, r.from_draft, r.drafted) for r in run]
        entries = [np.array(array) for part in cache for array in part.state[:2]]
        found.append([*tokens, *entries, mx.random.state[0].tolist()])
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
    rounds = built[: len(built) // 2]
    assert (None in rounds) == (length > 4)


def test_as_many_graphs_as_there_is_time_for(monkeypatch):
    now, found, pace = [0.0], [], built_ahead.Pace()
    monkeypatch.setattr(built_ahead, "clock", lambda: now[0])
    for device in [10.0] * 8 + [2.5] * 4:  # seconds of a verification; a graph takes one
        pace.built(pace.graphs, pace.graphs)
        now[0] += max(0.0, device - pace.graphs)
        pace.verified()
        found.append(pace.graphs)
    assert found == [2, 3, 4, 5, 5, 5, 5, 5, 4, 3, 2, 2]


@pytest.mark.parametrize("taken", [1, 4, 6, 9])
def test_close_during_queued_draft_trims_cache(taken):
    gearbox, cache = Gearbox(tiny_model(), "4,16", kernels="mlx"), None
    for mode in (Lossless(draft_length=3, lookup_tokens=0), gearbx_mlx.Static("high")):
        before, cache = cache, make_prompt_cache(gearbox.model)
        run = stream_generate(gearbox.model, endless(), TOKENS, 30, gearbox=gearbox, mode=mode, prompt_cache=cache)
        assert len(list(itertools.islice(run, taken))) == taken
        run.close()
    assert {part.offset for part in before} == {len(TOKENS) + taken}
    for mine, other in zip(before, cache):
        assert mx.array_equal(*(part.keys[..., : len(TOKENS) + taken, :] for part in (mine, other)))


@pytest.mark.parametrize("draft", ["4", "8"])
def test_low_gear_cost_follows_its_bits(draft):
    gearbox = Gearbox(tiny_model(), "4,8,16")
    drafter = LowGear.of(DraftTarget(gearbox, [], Chooser(greedy_sampler), draft=draft))
    assert drafter.name == f"{draft} bits"
    assert int(draft) / 16 < drafter.cost < 1


def test_draft_of_top_gear_bits_costs_plain_token():
    assert draft_cost(8, 8) == 1.0
    assert draft_cost(4, 16) < draft_cost(4, 8) < draft_cost(8, 8)


def test_gear_made_during_generation_drafts_later(compiled, monkeypatch):
    monkeypatch.setenv("GEARBX_TUNE", "1")
    gearbox = Gearbox(tiny_model(dtype=mx.bfloat16), "4,8,16", kernels="native")
    next(stream_generate(gearbox.model, endless(), TOKENS, 1, gearbox=gearbox, mode=Lossless(4)))
    for draft in (8, 4):
        mode = Lossless(draft, lookup_tokens=0)
        drafted = [
            r.drafted for r in stream_generate(gearbox.model, endless(), TOKENS, 200, gearbox=gearbox, mode=mode)
        ]
        assert sum(drafted) > 0
    gearbox.cap({layer.path: 4 for layer in gearbox.layers})  # as another text's controller does
    gearbox.cap({})
    run = stream_generate(gearbox.model, endless(), TOKENS, 200, gearbox=gearbox, mode=Lossless(draft_length=3))
    assert sum(r.drafted for r in run) > 0
