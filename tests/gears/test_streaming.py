"""Residency stream: the top gear of a checkpoint of format exact, read from the disk at every use."""

import copy
import gc
import json
import os
import shutil
import threading
import time

import mlx.core as mx
import numpy as np
import pytest
from conftest import PROMPT, active_memory, every_gear, save_model, tiny_model
from mlx_lm.models.cache import make_prompt_cache
from mutations import change_array, flip, sign_arrays

import gearbx_mlx
from gearbx_mlx import Gearbox, GearbxError, stream_generate
from gearbx_mlx.convert import convert
from gearbx_mlx.gears.adapters import layers_of
from gearbx_mlx.gears.cost import used_share
from gearbx_mlx.gears.gearbox import attached
from gearbx_mlx.gears.manifest import MANIFEST
from gearbx_mlx.gears.saved import open_gears
from gearbx_mlx.gears.strips import Piece, Strip, StripReader
from gearbx_mlx.gears.tensor_files import ArrayHashes, ArrayPlace, hash_place

LAYERS = 6
MODELS = {
    "llama": {"num_hidden_layers": LAYERS},
    "tied": {"tie_word_embeddings": True},
    "qwen3_moe": {},  # experts
    "deepseek_v3": {},  # matrices of heads
    "gpt_neox": {},  # biases
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model, converted on first use: (architecture, what its embeddings are) -> its directory."""
    made = {}

    def of(architecture="llama", embeddings="quantize"):
        if (architecture, embeddings) not in made:
            folder = tmp_path_factory.mktemp(architecture)
            name = "llama" if architecture == "tied" else architecture
            save_model(tiny_model(name, dtype=mx.bfloat16, **MODELS[architecture]), folder / "original")
            settings = {"gears": "4,16", "format": "exact", "q_group_size": 32, "embeddings": embeddings}
            made[architecture, embeddings] = convert(folder / "original", folder / "geared", **settings)
        return made[architecture, embeddings]

    return of


@pytest.fixture
def copied(checkpoint, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(checkpoint(), tmp_path / "copied")


def gearbox_of(path, residency="stream", kernels="auto"):
    return Gearbox(gearbx_mlx.load(path)[0], residency=residency, kernels=kernels)


def logits(gearbox, tokens=PROMPT):
    gearbox.shift(gearbox.ladder.top)
    found = gearbox.model(tokens)
    mx.eval(found)
    return found


def text(path, gearbox, mode):
    tokenizer = gearbx_mlx.load(path)[1]
    responses = stream_generate(gearbox.model, tokenizer, [1, 5, 9, 2], 12, gearbox=gearbox, mode=mode)
    return [response.token for response in responses]


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gearbx stream")]


def assert_no_reader_is_left():
    gc.collect()
    end = time.monotonic() + 10
    while readers() and time.monotonic() < end:
        time.sleep(0.01)
    assert not readers()


def remainder_of(box, positions=1):
    """Bytes that a pass over so many tokens reads from the disk, in the top gear."""
    modules, top = layers_of(box.model), box.ladder.top
    shares = {layer.path: used_share(layer.path, modules, positions) for layer in box.layers}
    return sum(shares[layer.path] * box.source.disk_bytes(layer, box.bits_of(layer, top)) for layer in box.layers)


class TestResidentEquality:
    @pytest.mark.parametrize(("kernels", "strip"), [("mlx", 2**20), ("native", 2**20), ("auto", 2**10)])
    def test_logits_in_every_gear(self, checkpoint, monkeypatch, kernels, strip):
        monkeypatch.setattr("gearbx_mlx.kernels.exact.WEIGHTS_DECODED_AT_ONCE", strip)
        path = checkpoint("tied")
        streamed, kept = (gearbox_of(path, name, kernels) for name in ("stream", "resident"))
        for _ in every_gear(streamed, kept, gears=(*streamed.ladder, *streamed.ladder)):
            for tokens in (PROMPT, PROMPT[:, :1]):
                assert mx.array_equal(streamed.model(tokens), kept.model(tokens)).item()

    @pytest.mark.some(2)
    @pytest.mark.parametrize("architecture", MODELS)
    def test_logits_of_every_kind_of_layer(self, checkpoint, architecture):
        path = checkpoint(architecture)
        boxes = [gearbox_of(path, name) for name in ("stream", "resident")]
        first, second = (logits(box) for box in boxes)
        assert mx.array_equal(first, second).item()
        caches = [make_prompt_cache(box.model) for box in boxes]
        for tokens in (PROMPT, PROMPT[:, :1], PROMPT[:, 1:4]):
            streamed, kept = (box.model(tokens, cache=cache) for box, cache in zip(boxes, caches))
            assert mx.array_equal(streamed, kept).item()

    @pytest.mark.some(1)
    @pytest.mark.parametrize("mode", ["static", "route", "kickdown", "lossless"])
    def test_outputs_are_equal(self, checkpoint, mode):
        path = checkpoint()
        assert text(path, gearbox_of(path), mode) == text(path, gearbox_of(path, "resident"), mode)


def test_summary_counts_bytes_of_its_run(checkpoint):
    path = checkpoint()
    gearbox, tokenizer = gearbox_of(path), gearbx_mlx.load(path)[1]
    read = []
    for _ in range(2):
        responses = stream_generate(gearbox.model, tokenizer, [1, 5, 9, 2], 12, gearbox=gearbox, mode="static")
        list(responses)
        read.append(responses.summary()["streaming"]["disk_bytes_per_token"])
    assert read[1] == pytest.approx(read[0], rel=0.2)


class TestMemory:
    def test_the_remainder_is_not_in_memory(self, checkpoint):
        path = checkpoint()
        peaks, active = [], []
        for residency in ("resident", "stream"):
            before = active_memory()
            box = gearbox_of(path, residency)
            logits(box)
            mx.reset_peak_memory()
            logits(box, PROMPT[:, :1])
            active.append(active_memory() - before)
            peaks.append(mx.get_peak_memory() - before)
            remainder = remainder_of(box)
            del box
        strip = 64 * 128 * 1.2  # bytes of the largest layer
        assert remainder > 0.4 * active[0]
        assert active[1] < active[0] - remainder * (1 - 1 / 8) + 3 * strip
        assert peaks[1] < peaks[0] - remainder * (1 - 1 / 8) + 8 * strip

    def test_every_pass_reads_the_remainder_once(self, checkpoint):
        box = gearbox_of(checkpoint())
        reader, remainder = box.residency.reader, remainder_of(box)
        logits(box)
        before = reader.bytes_read
        for _ in range(10):
            logits(box)
        assert reader.bytes_read - before == pytest.approx(10 * remainder, rel=0.05)

    def test_an_embedding_is_read_by_the_row(self, checkpoint):
        box = gearbox_of(checkpoint("tied", "keep"))
        box.shift(4)  # its head is in memory, and its rows are exact
        box.model(PROMPT)
        reader = box.residency.reader
        before = reader.bytes_read
        mx.eval(box.model(mx.array([[3, 7, 3]])))
        width = box.model.args.hidden_size
        assert 2 * width <= reader.bytes_read - before < 2 * width * 2

    def test_only_chosen_experts_are_read(self, checkpoint):
        box = gearbox_of(checkpoint("qwen3_moe"))
        logits(box)
        reader = box.residency.reader
        logits(box, PROMPT[:, :1])
        before = reader.bytes_read
        for _ in range(10):
            logits(box, PROMPT[:, :1])
        read = (reader.bytes_read - before) / 10
        assert read < 0.9 * remainder_of(box, 1000)
        assert read == pytest.approx(remainder_of(box), rel=0.05)


def names_of(path, layer):
    """The names of a layer's arrays in the top gear."""
    return json.loads((path / MANIFEST).read_text())["layers"][f"model.layers.{layer}"]["gears"]["16"]


def place_of(path, name):
    return open_gears(path).hashes.places[name]


class TestDamagedFiles:
    def spoil(self, path, name, at=-1):
        """Change one byte of an array."""
        change_array(place_of(path, name).file, name, lambda data: flip(data, at))

    @pytest.mark.parametrize("array", ["low", "high"])
    def test_a_changed_byte(self, copied, array):
        box = gearbox_of(copied)
        box.shift("high")
        names = names_of(copied, "3.mlp.down_proj")
        self.spoil(copied, names[array], 4500 if array == "low" else -1)
        with pytest.raises(
            GearbxError, match=rf"{names[array]} is damaged, or from a different model; download it again"
        ):
            box.model(PROMPT)
        assert_no_reader_is_left()

    def test_changed_byte_outside_read_rows(self, tmp_path):
        model = tiny_model(dtype=mx.bfloat16)
        for layer in model.layers:
            layer.mlp.up_proj.weight = mx.ones_like(layer.mlp.up_proj.weight)  # nothing near zero
        save_model(model, tmp_path / "original")
        convert(tmp_path / "original", tmp_path / "geared", gears="4,16", format="exact", q_group_size=32)
        name = names_of(tmp_path / "geared", "0.mlp.up_proj")["high"]
        assert place_of(tmp_path / "geared", name).size == 1
        box = gearbox_of(tmp_path / "geared")
        self.spoil(tmp_path / "geared", name)
        with pytest.raises(GearbxError, match=rf"{name} is damaged, or from a different model; download it again"):
            logits(box)

    def test_offsets_of_other_layer(self, copied):
        place = place_of(copied, names_of(copied, "2.mlp.up_proj")["offsets"])
        for first in (0, 2**31):
            with open(place.file, "r+b") as file:
                file.seek(place.begin + 8)
                file.write(first.to_bytes(4, "little"))
            sign_arrays(copied)
            with pytest.raises(GearbxError, match=r"up_proj: its offsets do not cover"):
                logits(gearbox_of(copied))

    def test_an_interrupt_ends_the_thread(self, checkpoint, monkeypatch):
        path = checkpoint()
        box = gearbox_of(path)
        expected = logits(box)
        assert readers()

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", interrupted)
            with pytest.raises(KeyboardInterrupt):
                [logits(box) for _ in range(2)]  # the first strips may be read already
        assert_no_reader_is_left()  # although the model is there
        assert mx.array_equal(logits(box), expected).item()


@pytest.fixture
def layer(tmp_path):
    """A reader of one layer of random bytes, and its strips, each with `size` low and `size` high bytes."""

    def of(strips, size):
        file = tmp_path / "layer"
        file.write_bytes(np.random.default_rng(0).bytes(2 * strips * size))
        places = {"low": ArrayPlace(file, 0, strips * size), "high": ArrayPlace(file, strips * size, 2 * strips * size)}
        hashes = {name: hash_place(place) for name, place in places.items()}

        def cut(n):
            return [Piece(name, place.begin + n * size, place.begin + (n + 1) * size) for name, place in places.items()]

        return StripReader(ArrayHashes(places, hashes), True), [Strip(n, n + 1, *cut(n)) for n in range(strips)]

    return of


def first_byte(strip, memory):
    return memory[:1].astype(mx.float32)


class TestReader:
    def test_memory_is_eighth_of_bytes_with_mixed_sizes(self, layer):
        reader, strips = layer(240, 2**16)
        whole, none = Piece("low", 0, 10 * 2**16), strips[0].high._replace(end=strips[0].high.begin)
        large = [Strip(0, 10, whole, none) for _ in range(4)]
        wanted = large + strips
        size = sum(strip.size for strip in wanted)
        before = active_memory()
        mx.reset_peak_memory()
        for _ in range(3):
            mx.eval(reader.over(wanted, first_byte))
        assert mx.get_peak_memory() - before < size / 8 + 2**14  # and the computation

    def test_reordered_strips_are_verified(self, layer):
        reader, strips = layer(6, 2**10)
        with open(reader.hashes.places["low"].file, "r+b") as file:
            file.write(bytes(8))  # in the first strip, which is not read
        with pytest.raises(GearbxError, match=r"low is damaged, or from a different model; download it again"):
            reader.over([strips[2], strips[1], *strips[3:]], first_byte)


class TestRefusals:
    def test_ungeared_checkpoint_is_refused(self):
        with pytest.raises(GearbxError, match=r"needs a geared checkpoint.*convert --format exact"):
            Gearbox(tiny_model(dtype=mx.bfloat16), "4,16", format="exact", residency="stream")

    def test_other_format_is_refused(self, tmp_path):
        save_model(tiny_model(dtype=mx.bfloat16), tmp_path / "original")
        convert(tmp_path / "original", tmp_path / "planes", gears="4,16", q_group_size=32)
        with pytest.raises(GearbxError, match=r"for gears of format exact, not planes; use gearbx_mlx convert"):
            gearbox_of(tmp_path / "planes")


class TestSeveral:
    def test_a_copy_reads_for_itself(self, checkpoint):
        box = gearbox_of(checkpoint())
        expected = logits(box)
        copied = attached(copy.deepcopy(box.model))
        read = box.residency.reader.bytes_read
        del box
        gc.collect()
        assert mx.array_equal(logits(copied), expected).item()
        assert copied.residency.reader.bytes_read <= read

    def test_the_thread_ends_with_the_model(self, checkpoint):
        box = gearbox_of(checkpoint())
        logits(box)
        assert readers()
        del box
        assert_no_reader_is_left()
