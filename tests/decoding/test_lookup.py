"""Prompt lookup in lossless mode: the text itself proposes what follows, and the text is the top gear's."""

import os
from collections import Counter

import pytest
from conftest import ARCHITECTURES, assert_same_text, loaded_demo, tiny_model
from conftest import written as told
from lossless_texts import TWICE, assert_written, written
from mlx_lm.models.cache import make_prompt_cache
from test_lossless import SAMPLERS, both

from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, Lossless, stream_generate
from gearbx_mlx.decoding.drafters.lookup import LookupMemory
from gearbx_mlx.decoding.learned import KeptPolicy
from gearbx_mlx.decoding.policy import FixedPolicy


class Certain(FixedPolicy):
    """Takes every proposal from the text."""

    def lookup_length(self, probabilities):
        return len(probabilities)


class Trusting(Lossless):
    def policy_for(self, gearbox, drafter, chooser):
        return KeptPolicy(Certain(4))


class TestLookup:
    """The text itself proposes what follows."""

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_bit_for_bit_on_every_architecture(self, architecture):
        gearbox = Gearbox(tiny_model(architecture), "6,16", kernels="native")
        prompt = [1, 5, 9, 2, 7, 1, 5, 9, 2, 7, 1, 5]
        assert_written(written(gearbox, prompt, 40, Trusting()), written(gearbox, prompt, 40))

    @pytest.mark.some(2)
    @pytest.mark.parametrize("sampler", ["greedy", "temperature", "top-p"])
    def test_same_seed_draws_same_tokens(self, geared_demo, demo, sampler):
        how = {"max_tokens": 50, "sampler": SAMPLERS[sampler], "mode": Trusting()}
        (theirs, after), (ours, after_ours) = both(geared_demo, demo.tokenizer, TWICE, **how)
        assert_same_text(told(ours), told(theirs))
        assert after == after_ours
        assert any(r.lookup_drafted for r in ours)

    def test_lookup_tokens_have_source_and_read_no_weights(self, geared_demo, demo):
        mode = Trusting()
        run = list(stream_generate(demo.model, demo.tokenizer, TWICE, 40, gearbox=geared_demo, mode=mode))
        low, high = (geared_demo.weight_bytes_per_token(gear) for gear in geared_demo.ladder)
        sources = Counter(r.source for r in run)
        assert sources["model"] == sum(r.passes[1] for r in run)
        assert 0 < sources["lookup"] <= sum(r.lookup_drafted for r in run)
        assert all(r.passes[0] == r.drafted for r in run)
        assert all(not (r.drafted and r.lookup_drafted) for r in run)
        for r in run:
            if r.passes[1]:
                row = (
                    geared_demo.weight_bytes_per_token(geared_demo.ladder.top, 1 + r.drafted + r.lookup_drafted) - high
                )
                assert r.weight_bytes == r.passes[0] * low + high + row
            assert r.from_draft == (r.source == "draft")
            assert r.gear == ("low" if r.from_draft else "high")

    def test_same_output_has_same_passes_without_measuring(self, geared_demo, demo):
        how = {"gearbox": geared_demo, "mode": Lossless()}
        runs = [stream_generate(demo.model, demo.tokenizer, TWICE, 30, **how) for _ in range(2)]
        first, second = ([(r.token, r.passes, r.source) for r in run] for run in runs)
        assert first == second

    def test_can_be_turned_off_and_bounded(self, geared_demo, demo):
        for most in (0, 3):
            mode = Lossless(lookup_tokens=most)
            run = list(stream_generate(demo.model, demo.tokenizer, TWICE, 30, gearbox=geared_demo, mode=mode))
            assert max(r.lookup_drafted for r in run) == most

    @pytest.mark.parametrize(
        ("setting", "says"),
        [
            ({"lookup_tokens": 16}, "lookup_tokens: out of range, got 16; use 0 to 15"),
            ({"lookup_tokens": True}, "lookup_tokens: must be a whole number, got True"),
            ({"lookup_tokens": 3.0}, "lookup_tokens: must be a whole number, got 3.0"),
            ({"lookup_tokens": "3"}, "lookup_tokens: must be a whole number, got '3'"),
        ],
    )
    def test_unknown_values_are_refused(self, setting, says):
        with pytest.raises(GearbxError, match=says):
            Lossless(**setting)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "lossless: drafts of 3 tokens; prompt lookup up to 15 tokens"),  # with GEARBX_TUNE=0
        (("--num-draft-tokens", 4), "lossless: drafts of 4 tokens; prompt lookup none"),
        (("--num-draft-tokens", 1), "lossless: drafts of 1 token; prompt lookup none"),
    ],
)
def test_verbose_names_token_drafters(command, flags, says):
    done = command("generate", "-p", "The", "-m", 2, "--mode", "lossless", "--verbose", "all", *flags)
    assert done.status == 0
    assert says in done.err.replace("\n", " ")


def test_default_draft_length_is_learned(monkeypatch):
    monkeypatch.delenv("GEARBX_TUNE", raising=False)
    assert Lossless().about() == "lossless: draft length learned; prompt lookup up to 15 tokens"


class TrustingInMemory(Trusting):
    def is_fixed(self, gearbox):
        return False


def drafted(mode, prompt=TWICE, count=30):
    """Return the tokens of a new gearbox, and the number that lookup proposed."""
    demo = loaded_demo()
    gearbox = Gearbox(demo.model, "4,16")
    run = list(stream_generate(demo.model, demo.tokenizer, prompt, count, gearbox=gearbox, mode=mode))
    return [r.token for r in run], sum(r.source == "lookup" for r in run)


class TestRemembered:
    """Tokens of earlier starts, in a file."""

    def test_later_start_copies_the_earlier_text(self, tmp_path):
        file = tmp_path / "tokens"
        (first, accepted), (second, more) = (drafted(TrustingInMemory(remember=file)) for _ in range(2))
        assert first == second
        assert more > accepted
        assert file.stat().st_mode & 0o777 == 0o600

    def test_sequences_of_model_share_lookup_by_default(self, geared_demo, demo):
        for shared in (True, False):
            mode = TrustingInMemory(share_lookup=shared)
            how = {"gearbox": geared_demo, "mode": mode}
            runs = [list(stream_generate(demo.model, demo.tokenizer, "A dog", 30, **how)) for _ in range(2)]
            counts = [sum(r.source == "lookup" for r in run) for run in runs]
            assert (counts[1] > counts[0]) is shared

    def test_sequence_closed_in_a_round_is_kept_once(self, tmp_path):
        file, demo = tmp_path / "tokens", loaded_demo()
        gearbox, cache = Gearbox(demo.model, "4,16"), make_prompt_cache(demo.model)
        how = {"gearbox": gearbox, "mode": TrustingInMemory(remember=file), "prompt_cache": cache}
        run, count = stream_generate(demo.model, demo.tokenizer, TWICE, 60, **how), 0
        for response in run:
            count += 1
            if response.source == "lookup":  # the first of several tokens of a round
                run.close()
        kept = [each >> 1 for each in LookupMemory(file, demo.tokenizer, 10**6).table.tokens if each >= 0]
        prompt = demo.tokenizer.encode(TWICE)
        assert kept[: len(prompt)] == prompt
        assert len(prompt) + count <= len(kept) <= len(prompt) + count + 16

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b'{"tokenizer": "other", "tokens": "AAAAAA=="}', b'{"tokens": "//"}', b'{"tokens": "AAAAAA=="}'],
    )
    def test_damaged_or_foreign_file_is_replaced(self, tmp_path, content):
        file = tmp_path / "tokens"
        file.write_bytes(content)
        with pytest.warns(GearbxWarning, match=str(file)) as warned:
            found, _ = drafted(TrustingInMemory(remember=file))
        assert len([each for each in warned if str(file) in str(each.message)]) == 1
        assert found == drafted(Lossless())[0]
        assert drafted(TrustingInMemory(remember=file))[1] > 5

    def test_two_processes_keep_the_tokens_of_both(self, tmp_path):
        file = tmp_path / "tokens"
        demo = loaded_demo()
        one, other = (LookupMemory(file, demo.tokenizer, 4096) for _ in range(2))
        for memory, tokens in ((one, range(100, 110)), (other, range(200, 210)), (one, range(300, 310))):
            memory.table.begin()
            for token in tokens:
                memory.table.read(token)
            memory.save()
        table = LookupMemory(file, demo.tokenizer, 4096).table
        for start in (100, 200, 300):
            table.begin()
            for token in range(start, start + 4):
                table.read(token)
            assert table.proposed(6) == [*range(start + 4, start + 10)]

    @pytest.mark.skipif(os.name == "nt", reason="files have no such permissions")
    def test_file_writable_by_others_is_not_used(self, tmp_path):
        file = tmp_path / "tokens"
        file.write_text("{}")
        file.chmod(0o666)
        with pytest.warns(GearbxWarning, match="others may write to"):
            drafted(TrustingInMemory(remember=file))
        assert file.read_text() == "{}"

    def test_path_below_file_is_named(self, tmp_path):
        (tmp_path / "tokens").write_text("{}")
        with pytest.warns(GearbxWarning, match="tokens/below: cannot be used"):
            drafted(TrustingInMemory(remember=tmp_path / "tokens" / "below"))
