"""The gear that reads the prompt, and schedules: which gear computes each token, and what the KV cache then holds."""

import mlx.core as mx
import numpy as np
import pytest
from chats import ASKED, MORE, chat
from conftest import on_disk, tiny_model
from mlx_lm.models.cache import make_prompt_cache

from gearbx_mlx import Gearbox, GearbxWarning, Kickdown, Route, Static, batch_generate, generate, stream_generate
from gearbx_mlx.decoding.mode import best_prefill_gear

TALE = "Once upon a time there was a king"
READ_BY = {None: "high", "same": "low", 3: "low", "high": "high"}  # the gear, by the prompt gear that is asked for
LOW_TEXTS = [(Static("low", prompt_gear=asked), reads) for asked, reads in READ_BY.items()]
LOW_TEXTS += [(Kickdown([1e3]), "high"), (Route([1e3], initial_gear="low"), "high")]


def by_hand(demo, gearbox, reads, writes, count):
    """Greedy tokens: one gear reads the prompt except its last token, another gear computes everything after."""
    tokens, cache = demo.tokenizer.encode(TALE), make_prompt_cache(demo.model)
    gearbox.shift(reads)
    mx.eval(demo.model(mx.array([tokens[:-1]]), cache=cache))
    gearbox.shift(writes)
    text = tokens[-1:]
    for _ in range(count):
        text.append(int(mx.argmax(demo.model(mx.array([text[-1:]]), cache=cache)[0, -1]).item()))
    gearbox.shift("high")
    return text[1:]


class TestPrefillGear:
    @pytest.mark.parametrize(("mode", "reads"), LOW_TEXTS, ids=str)
    def test_output_matches_prefill_in_this_gear(self, demo, geared_demo, mode, reads):
        found = list(stream_generate(demo.model, demo.tokenizer, TALE, 12, mode=mode, gearbox=geared_demo))
        assert [response.token for response in found] == by_hand(demo, geared_demo, reads, "low", 12)
        assert {response.gear for response in found} == {"low"}

    def test_batch_outputs_equal_single_outputs(self, demo, geared_demo):
        prompts = [TALE, "There was a miller"]
        modes = Static("low"), Static("low", prompt_gear="same")
        for mode in modes:
            found = batch_generate(demo.model, demo.tokenizer, prompts, max_tokens=10, mode=mode, gearbox=geared_demo)
            shared = {"max_tokens": 10, "mode": mode, "gearbox": geared_demo}
            alone = [generate(demo.model, demo.tokenizer, each, **shared) for each in prompts]
            assert found.texts == alone

    def test_without_top_gear_prefill_uses_output_gear(self, demo, tmp_path):
        model = tiny_model()
        gearbox = Gearbox(model, "4,16", **on_disk(model, tmp_path))
        keywords = {"mode": Static("low"), "gearbox": gearbox, "max_tokens": 3}
        with pytest.warns(GearbxWarning, match="prompt-gear high"):
            list(stream_generate(model, demo.tokenizer, [1, 2, 3, 4], **keywords))
        assert "high" not in gearbox.active_memory or gearbox.shifts <= 1
        list(stream_generate(model, demo.tokenizer, [1, 2, 3, 4], **keywords))  # said once


class TestChat:
    @pytest.mark.parametrize("gear", ["low", "high"])
    def test_low_gear_answer_is_read_again(self, gear):
        with chat(gears="3,16", gear=gear) as session:
            asked = session.conversation.tokens(ASKED)
            session.answer(ASKED)
            read = session.cache.tokens
            assert (read == asked[:-1]) == (gear == "low")
            session.answer(MORE)
            assert session.cache.tokens[: len(asked)] == asked
            entries, box = session.cache.entries, session.model._geared.gearbox
            box.shift("high")
            whole = make_prompt_cache(box.model)
            mx.eval(box.model(mx.array([session.cache.tokens]), cache=whole))
            for mine, top in zip(entries, whole):
                count = len(session.cache.tokens)
                assert np.allclose(np.array(mine.keys[..., :count, :]), np.array(top.keys[..., :count, :]), atol=1e-3)

    def test_mode_rereads_only_lower_gear_tokens(self):
        with chat(gears="3,8,16", mode="static", gear="low", prompt_gear="8") as session:
            read = session.cache
            session.answer(ASKED)
            assert set(read.bits) == {8}
            session.model.change("lossless", [])
            session.answer(MORE)
            assert set(read.bits) == {16}
            top = len(read.bits)
            session.model.change("static", [])
            session.answer(MORE)
            assert read.bits[:top] == [16] * top
            assert set(read.bits[top:]) == {8}
            asked = session.conversation.tokens(ASKED)
            assert read.unread(asked, 16) == asked[top:]


def test_saved_conversation_names_its_prefill_gear(command, tmp_path):
    saved = tmp_path / "kept.safetensors"
    with chat(gears="3,16", gear="low") as session:
        session.answer(ASKED)
        session.save_cache(saved)
    given = ["generate", "--gears", "3,16", "--gear", "low", "--prompt-cache-file", saved, "-p", MORE, "-m", 4]
    assert str(saved) not in command(*given).err
    result = command(*given, "--prompt-gear", "3")
    assert result.status == 0
    assert f"{saved}: computed in 16 bits" in result.err


def test_prefill_gear_on_native_kernels_has_8_bits(compiled):
    model = tiny_model()
    assert best_prefill_gear(Gearbox(model, "4,8,16", kernels="native")).bits == 8
    assert best_prefill_gear(Gearbox(model, "4,8,16", kernels="mlx")).bits == 16
    assert best_prefill_gear(Gearbox(model, "4,16", kernels="native")).bits == 16
