"""Draft heads: hidden states, drafts that change no output, the released format, and mlx-vlm's class."""

import json
import shutil
import warnings

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import KEYWORDS, PROMPT, tiny_model
from heads import save_head
from lossless_texts import assert_written, endless, written
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from refusals import assert_refused, refuses

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError, GearbxWarning, Lossless, load, stream_generate
from gearbx_mlx.decoding.drafters import DraftTarget, eagle
from gearbx_mlx.decoding.drafters.eagle import Eagle
from gearbx_mlx.decoding.head_files import attach_head, attached_head, is_head, kept_head, read_head
from gearbx_mlx.decoding.heads import Head
from gearbx_mlx.decoding.hidden import recorded
from gearbx_mlx.decoding.policy import FixedPolicy
from gearbx_mlx.decoding.response import GeneratedText
from gearbx_mlx.decoding.rows import Verifier
from gearbx_mlx.decoding.sampling import Chooser
from gearbx_mlx.formats.block import head_parts
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.ranks.agreement import SINGLE_PROCESS, Agreement

TOKENS = PROMPT[0].tolist()
SAMPLED = {"sampler": gearbx_mlx.make_sampler(0.8)}
MODES = Lossless(draft_length=4, lookup_tokens=0), Lossless(draft_length=2, lookup_tokens=4), Lossless()


@pytest.fixture(params=["mlx", "native"])
def kernels(request) -> str:
    """The kernels available here."""
    if request.param == "native":
        request.getfixturevalue("compiled")
    return request.param


def boxed(architecture="llama", kernels="mlx", dtype=mx.float32, **change):
    return Gearbox(tiny_model(architecture, dtype=dtype, **change), "4,16", kernels=kernels)


def headed(directory, box, **change):
    """The gearbox's model has this head."""
    head = read_head(save_head(directory, box.model, **change), box.model)
    attach_head(box.model, head)
    return head


class TestOutputs:
    @pytest.mark.some(4)
    @pytest.mark.parametrize("settings", [*KEYWORDS.values(), SAMPLED], ids=[*KEYWORDS, "own sampler"])
    def test_drafts_of_random_head_leave_output_unchanged(self, kernels, settings, tmp_path):
        box, keywords = boxed(kernels=kernels), {"max_tokens": 30} | settings
        headed(tmp_path, box)
        theirs = written(box, TOKENS * 3, **keywords)
        for mode in MODES:
            assert_written(written(box, TOKENS * 3, mode=mode, **keywords), theirs)

    @pytest.mark.some(3)
    @pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "mixtral", "phi3", "gpt_oss"])
    def test_other_architectures_have_the_same_tokens(self, kernels, architecture, tmp_path):
        box = boxed(architecture, kernels)
        headed(tmp_path, box)
        theirs, _ = written(box, TOKENS * 3)
        ours, _ = written(box, TOKENS * 3, mode=MODES[0])
        assert [token for token, _ in ours] == [token for token, _ in theirs]

    def test_draft_after_many_unread_states_succeeds(self, kernels, tmp_path, monkeypatch):
        monkeypatch.setattr(eagle, "MAX_UNREAD", 0)
        box = boxed(kernels=kernels)
        head = headed(tmp_path, box)
        theirs = written(box, TOKENS * 3, max_tokens=30)
        with warnings.catch_warnings():
            warnings.simplefilter("error", GearbxWarning)
            assert_written(written(box, TOKENS * 3, mode=MODES[1], max_tokens=30, draft_model=head), theirs)


def states_of(box, head, tokens):
    """Entries of the head's cache for a whole sequence, from hidden states of one pass."""
    cache = make_prompt_cache(head)
    with recorded(box.model, head.taps) as hidden:
        box.model(mx.array([tokens]), cache=make_prompt_cache(box.model))
    states = head.fuse(mx.concatenate([hidden[tap] for tap in head.taps], axis=-1)[:, :-1])
    head(box.model.model.embed_tokens(mx.array([tokens[1:]])), states, cache)
    return entries(cache[0])


def entries(cache):
    """Keys and values in use."""
    return [array[..., : cache.offset, :] for array in (cache.keys, cache.values)]


class TestCache:
    @pytest.mark.parametrize("mode", MODES)
    def test_entries_after_rejections_equal_recomputed_ones(self, kernels, mode, tmp_path):
        box = boxed(kernels=kernels)
        head = headed(tmp_path, box)
        cache = [*make_prompt_cache(box.model), *make_prompt_cache(head)]
        keywords = {"gearbox": box, "mode": mode, "draft_model": head, "prompt_cache": cache, "prefill_step_size": 3}
        run = [r.token for r in stream_generate(box.model, endless(), TOKENS * 3, 20, **keywords)]
        tokens = TOKENS * 3 + run
        assert cache[-1].offset == len(tokens) - 1
        box.shift("high")
        for own, expected in zip(entries(cache[-1]), states_of(box, head, tokens)):
            assert mx.allclose(own, expected, atol=2e-2, rtol=0).item()

    def test_continued_cache_leaves_output_unchanged(self, kernels, tmp_path):
        box = boxed(kernels=kernels)
        head, outputs = headed(tmp_path, box), []
        for parts in ([box.model], [box.model, head]):  # with the head attached only, it sees nothing before a turn
            for draft_model in (None, head)[: len(parts)]:
                cache = [entry for part in parts for entry in make_prompt_cache(part)]
                keywords = {"prompt_cache": cache, "draft_model": draft_model}
                outputs.append([written(box, prompt, 12, MODES[0], **keywords) for prompt in (TOKENS, [3, 4], [8])])
        plain = make_prompt_cache(box.model)
        for prompt, *turns in zip((TOKENS, [3, 4], [8]), *outputs):
            theirs = written(box, prompt, 12, prompt_cache=plain)
            for ours in turns:
                assert_written(ours, theirs)

    def test_closed_run_keeps_entries_of_yielded_tokens(self, tmp_path):
        box = boxed()
        head = headed(tmp_path, box)
        cache = [*make_prompt_cache(box.model), *make_prompt_cache(head)]
        keywords = {"gearbox": box, "mode": MODES[0], "draft_model": head, "prompt_cache": cache}
        run = stream_generate(box.model, endless(), TOKENS, 20, **keywords)
        tokens = TOKENS + [next(run).token for _ in range(4)]
        run.close()
        assert {part.offset for part in cache[:-1]} == {len(tokens)}
        assert cache[-1].offset == len(tokens) - 1
        for own, expected in zip(entries(cache[-1]), states_of(box, head, tokens)):
            assert mx.allclose(own, expected, atol=1e-4).item()


class TestHidden:
    @pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "gemma3"])
    @pytest.mark.parametrize("count", [1, 4])
    def test_states_are_outputs_of_blocks(self, kernels, architecture, count):
        box = boxed(architecture, kernels)
        model = getattr(box.model, "language_model", box.model).model
        tokens = mx.arange(3, 3 + count)
        found = Verifier(box, box.ladder.top, taps=(1, 2)).verify(tokens.tolist(), make_prompt_cache(box.model))
        x, own = model.embed_tokens(tokens[None]), {}
        if architecture.startswith("gemma3"):
            x = x * model.args.hidden_size**0.5
        for number, block in enumerate(model.layers, 1):
            own[number] = x = block(x, "causal" if count > 1 else None, None)
        assert set(found.hidden) == {1, 2}
        for tap, states in found.hidden.items():
            assert states.shape == (count, x.shape[-1])
            assert mx.allclose(states, own[tap][0], atol=1e-3).item()
        plain = Verifier(box, box.ladder.top).verify(tokens.tolist(), make_prompt_cache(box.model))
        assert mx.array_equal(found.logits, plain.logits)


SHAPES = {"llama": {}, "qwen3": {"head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e6}}


def drafts_after(box, head, rounds, length, processors=(), **settings):
    """Drafts, with their margins, after a prompt and after each round of accepted tokens."""
    cache, verifier = make_prompt_cache(box.model), Verifier(box, box.ladder.top, taps=head.taps)
    chooser = Chooser(settings.pop("sampler", greedy_sampler), processors)
    drafter = Eagle(DraftTarget(box, cache, chooser, **settings), head, make_prompt_cache(head))
    prompt, *others = rounds
    text = GeneratedText([*prompt])
    drafter.prefill(mx.array(prompt[:-1]), verifier.prefill(mx.array(prompt[:-1]), cache))
    for accepted in others:
        found = verifier.verify([text.last, *accepted[:-1]], cache)
        for token in accepted:
            text.add(token)
        drafter.update(text, found)
        proposal = drafter.propose(text, length, FixedPolicy(length))
        assert proposal.weight_bytes == head.nbytes
        yield np.array(proposal.tokens).tolist(), np.array(proposal.margins), proposal.is_known


class TestNative:
    @pytest.mark.parametrize("rows", [40, None], ids=["some rows", "all rows"])
    @pytest.mark.parametrize("settings", [{}, SAMPLED, {"processors": KEYWORDS["penalty"]["logits_processors"]}])
    def test_native_drafts_equal_those_of_the_module(self, compiled, rows, settings, tmp_path):
        box = boxed(kernels="native")
        head = read_head(save_head(tmp_path, box.model, rows=rows), box.model)
        head.put_in(True, mx.float32)
        rounds, found = [TOKENS, [7], [3, 11, 2], [5, 6], list(range(20, 40)), [9]], []
        for agreement in (SINGLE_PROCESS, Agreement()):  # ranks run the module
            mx.random.seed(7)
            found.append([*drafts_after(box, head, rounds, 4, agreement=agreement, **settings)])
        for (native, its_margins, is_native), (drafted, margins, _) in zip(*found, strict=True):
            assert is_native
            assert native == drafted
            assert its_margins == pytest.approx(margins, abs=1e-3)

    def test_head_of_known_parts_has_native_passes(self, compiled, tmp_path):
        box = boxed(kernels="native")
        head = read_head(save_head(tmp_path, box.model), box.model)
        assert head_parts(head, box.model.model.embed_tokens) is None
        head.put_in(True, mx.float32)
        assert head_parts(head, box.model.model.embed_tokens) is not None


class TestReleasedFormat:
    @pytest.mark.parametrize("rows", [40, None], ids=["some rows", "all rows"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_drafts_equal_those_of_mlx_vlm(self, shape, rows, tmp_path, monkeypatch):
        eagle3 = pytest.importorskip("mlx_vlm.speculative.drafters.eagle3")
        box = Gearbox(tiny_model(shape), "16", kernels="mlx")
        directory = save_head(tmp_path, box.model, "layers.0", rows, **SHAPES[shape])
        head = read_head(directory, box.model)
        monkeypatch.setattr(Head, "put_in", lambda *args: None)  # the head's own weights, not 4 bits
        rounds = [TOKENS, [7], [3, 11, 2], [5, 6]]
        ours = list(drafts_after(box, head, rounds, 4))

        theirs = eagle3.Model(eagle3.ModelConfig.from_dict(json.loads((directory / "config.json").read_text())))
        arrays = theirs.sanitize(mx.load(str(directory / "model.safetensors")))
        theirs.load_weights([*arrays.items()], strict=False)
        theirs.reset(box.model)
        tokens = [token for accepted in rounds for token in accepted]
        with recorded(box.model, head.taps) as hidden:
            box.model(mx.array([tokens]))
        states = mx.concatenate([hidden[tap] for tap in head.taps], axis=-1)
        margins = []

        def sampled(logits, sampler, dtype, greedy):
            best, following = mx.topk(logits.reshape(-1), 2)[::-1].tolist()
            margins.append(best - following)
            return theirs._draft_to_target(mx.argmax(logits, axis=-1), dtype)

        theirs._sample = sampled
        begin = len(TOKENS)
        theirs.prefill_from_target_hidden(mx.array([TOKENS]), states[:, :begin], 7, None, greedy=True)
        for accepted, (drafted, its_margins, _) in zip([*rounds[2:], None], ours, strict=True):
            expected = theirs.draft_block(0, None, None, 5, None, greedy=True)
            assert drafted == expected[0].tolist()
            assert its_margins == pytest.approx(margins[-4:], abs=1e-4)
            if accepted is not None:
                read, right = states[:, begin : begin + len(accepted)], mx.array([accepted[:-1]])
                theirs.accept_verified_tokens(read, right, len(accepted) - 1, accepted, None, greedy=True)
                begin += len(accepted)

    @pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
    def test_drafts_of_fixed_weights_are_known(self, prefix, tmp_path, monkeypatch):
        box = Gearbox(tiny_model(), "16", kernels="mlx")
        head = read_head(save_head(tmp_path, box.model, prefix), box.model)
        monkeypatch.setattr(Head, "put_in", lambda *args: None)
        first, second = drafts_after(box, head, [TOKENS, [7], [3, 11, 2]], 4)  # equal to mlx-vlm 0.7.10's
        assert first[0] == [121, 124, 64, 35]
        assert first[1] == pytest.approx([0.28099, 0.35858, 0.08795, 0.02119], abs=1e-3)
        assert second[0] == [34, 34, 34, 109]
        assert second[1] == pytest.approx([1.09407, 0.78867, 0.07544, 0.13937], abs=1e-3)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"hidden_size": 32}, ["hidden size is 32", "64"]),
            ({"vocab_size": 100}, ["vocabulary is 100"]),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, ["blocks 1, 2, 10"]),
            ({"architectures": ["LlamaForCausalLMEagle"]}, ["EAGLE-3"]),
            ({"num_hidden_layers": 2}, ["one layer"]),
            ({"hidden_size": "wide"}, ["config.json", "hidden_size"]),
            ({"intermediate_size": 128}, ["cannot be read as a draft head"]),
            ({"rope_scaling": {"rope_type": "none such"}}, ["cannot be read as a draft head"]),
            ({"hidden_size": 32, "target_hidden_size": 64}, ["no embed_tokens.weight"]),
            ({"draft_vocab_size": 39}, ["cannot be read as a draft head"]),
        ],
    )
    def test_head_of_another_model_is_refused(self, change, words, tmp_path):
        model = tiny_model()
        directory = save_head(tmp_path, model, **change)
        with refuses(str(directory), *words):
            read_head(directory, model)

    @pytest.mark.parametrize("damage", ["cut", "no weights", "d2t"])
    def test_damaged_head_is_refused(self, damage, tmp_path):
        model = tiny_model()
        weights = save_head(tmp_path, model) / "model.safetensors"
        if damage == "no weights":
            weights.unlink()
        elif damage == "cut":
            weights.write_bytes(weights.read_bytes()[:-9])
        else:
            arrays = dict(mx.load(str(weights)))
            mx.save_safetensors(str(weights), arrays | {"d2t": mx.zeros_like(arrays["d2t"]) + model.args.vocab_size})
        with refuses(str(tmp_path)):
            read_head(tmp_path, model)

    def test_quantized_head_is_read(self, tmp_path):
        model = tiny_model()
        directory = save_head(tmp_path, model, quantization={"group_size": 64, "bits": 8})
        expected = dict(mx.load(str(directory / "model.safetensors")))
        arrays = dict(expected)
        for name in ("fc.weight", "midlayer.self_attn.q_proj.weight", "lm_head.weight"):
            stem = name.removesuffix(".weight")
            arrays[name], arrays[f"{stem}.scales"], arrays[f"{stem}.biases"] = mx.quantize(arrays[name], 64, 8)
        mx.save_safetensors(str(directory / "model.safetensors"), arrays)
        head = read_head(directory, model)
        for own, name in ((head.fc, "fc"), (head.layer.self_attn.q_proj, "midlayer.self_attn.q_proj")):
            assert mx.allclose(own.weight, expected[f"{name}.weight"], atol=5e-3).item()

    @pytest.mark.parametrize("scale", [1, -1])
    def test_head_with_its_own_embedding_reads_it(self, scale, tmp_path):
        box, rounds = boxed(), [TOKENS, [7], [3, 11, 2]]
        head = read_head(save_head(tmp_path, box.model), box.model)
        directory = save_head(tmp_path / "own", box.model, embed_requires_grad=True)
        arrays = dict(mx.load(str(directory / "model.safetensors")))
        own = {"embed_tokens.weight": scale * box.model.model.embed_tokens.weight}
        mx.save_safetensors(str(directory / "model.safetensors"), arrays | own)
        other = read_head(directory, box.model)
        drafts = [[tokens for tokens, _, _ in drafts_after(box, each, rounds, 4)] for each in (head, other)]
        assert (drafts[0] == drafts[1]) is (scale == 1)

    def test_model_without_known_blocks_is_refused(self, tmp_path):
        directory = save_head(tmp_path, tiny_model())
        with refuses(str(directory), "no blocks"):
            read_head(directory, nn.Linear(4, 4))

    def test_reading_a_head_draws_no_random_numbers(self, tmp_path):
        model = tiny_model()
        save_head(tmp_path, model)
        mx.random.seed(7)
        read_head(tmp_path, model)
        assert mx.random.state[0].tolist() == mx.random.key(7).tolist()

    def test_head_of_another_model_ends_generation(self, tmp_path):
        head = read_head(save_head(tmp_path, tiny_model()), tiny_model())
        other = tiny_model(vocab_size=200)
        with pytest.raises(GearbxError, match="vocabulary"):
            list(
                stream_generate(
                    other, endless(), TOKENS, 4, mode=Lossless(), gearbox=Gearbox(other, "16"), draft_model=head
                )
            )


class TestFound:
    """A head beside the model, in the user's cache, or of --draft-model."""

    def test_requested_head_drafts_for_the_command(self, generated, tmp_path):
        save_head(tmp_path, load()[0], rows=None)
        done = generated("--draft-model", tmp_path, "--num-draft-tokens", 3, "-m", 12)
        assert {row["drafted"] for row in done.trace[:6]} == {0, 3}
        assert done.out == generated("-m", 12).out

    def test_command_refuses_head_of_another_model(self, command, tmp_path):
        done = command("generate", "--draft-model", save_head(tmp_path, tiny_model()), "-m", 2)
        assert_refused(done, str(tmp_path), "hidden size is 64, and the model's is 256")

    def test_other_draft_models_are_no_heads(self, tmp_path):
        assert not is_head(DEMO_MODEL)
        assert not is_head(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"architectures": None, "quantization": {"mode": "mxfp4"}}))
        assert not is_head(tmp_path)
        assert is_head(save_head(tmp_path / "head", tiny_model(), "layers.0"))

    @pytest.mark.parametrize("place", ["beside", "kept"])
    def test_head_of_a_model_is_found(self, place, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        directory = tmp_path / "model"
        shutil.copytree(DEMO_MODEL, directory, ignore=shutil.ignore_patterns("draft_head"))
        assert attached_head(load(directory)[0]) is None
        head = save_head(directory / "draft_head" if place == "beside" else kept_head(directory), load(directory)[0])
        head.parent.chmod(0o700)
        model = load(directory)[0]
        found = attached_head(model)
        assert found is attached_head(model)
        assert found.name == str(head)

    def test_unfit_head_beside_model_warns(self, tmp_path):
        model = tiny_model()
        attach_head(model, save_head(tmp_path, model, hidden_size=32))
        with pytest.warns(GearbxWarning, match="hidden size"):
            assert attached_head(model) is None
        assert attached_head(model) is None
